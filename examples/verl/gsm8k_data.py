"""GSM8K in verl's form: python examples/verl/gsm8k_data.py FOLDER -> train.parquet, test.parquet"""

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


def main(folder: str) -> None:
    from datasets import load_dataset

    Path(folder).mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        problems = load_dataset("openai/gsm8k", "main", split=split)
        rows = problems.map(
            lambda problem, number, split=split: row(problem, number, split),
            with_indices=True,
            remove_columns=problems.column_names,
        )
        rows.to_parquet(f"{folder}/{split}.parquet")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
