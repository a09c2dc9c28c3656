"""GSM8K in verl's form, train.parquet and test.parquet in FOLDER.

python examples/verl/gsm8k_data.py FOLDER            from the hub
python examples/verl/gsm8k_data.py FOLDER SOURCE     from SOURCE/train.jsonl and test.jsonl
"""

import json
import sys
from pathlib import Path
from typing import Any

ASK = 'Think step by step, then write the final number after "####".'


def row(problem: dict[str, str], number: int, split: str) -> dict[str, Any]:
    """A problem as verl's dataset and its GSM8K reward (by `data_source`) want it."""
    answer = problem["answer"].rsplit("####", 1)[1].strip().replace(",", "")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{problem['question']} {ASK}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": number},
    }


def problems(split: str, source: str | None) -> list[dict[str, str]]:
    """Questions and answers of a split, from a folder of JSON lines or from the hub."""
    if source is not None:
        return [json.loads(line) for line in (Path(source) / f"{split}.jsonl").open()]
    from datasets import load_dataset

    return list(load_dataset("openai/gsm8k", "main", split=split))


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes rows as a parquet file."""
    from datasets import Dataset

    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows).to_parquet(path)


def main(folder: str, source: str | None = None) -> None:
    for split in ("train", "test"):
        rows = [row(problem, i, split) for i, problem in enumerate(problems(split, source))]
        write(rows, Path(folder) / f"{split}.parquet")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
