"""Makes proxpo/data/sample_batch.json: two sums, four answers each, a policy a few updates stale.

    python scripts/make_sample_batch.py [FILE]

Python's own generator is used, whose sequence is the same on every machine and version.
"""

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "proxpo" / "data" / "sample_batch.json"
TOKENS = 24
# prompt, reward, response (one token per word; "…" marks a response cut at the limit)
RESPONSES = (
    ("17 + 25", 1.0, "7 + 5 = 12 , carry 1 . 1 + 2 + 1 = 4 . The answer is 42 <end>"),
    ("17 + 25", 0.0, "17 + 25 = 32 . The answer is 32 <end>"),
    ("17 + 25", 1.0, "17 + 25 = 42 <end>"),
    ("17 + 25", 0.0, "Let me see . 17 is 10 + 7 and 25 is 20 + 5 so 10 + 20 is 30 and 7 …"),
    ("38 + 46", 0.0, "38 + 46 = 74 . So the answer is 74 <end>"),
    ("38 + 46", 1.0, "30 + 40 = 70 , 8 + 6 = 14 , 70 + 14 = 84 . Answer : 84 <end>"),
    ("38 + 46", 0.0, "I think it is 94 <end>"),
    ("38 + 46", 0.0, "38 + 40 = 78 , 78 + 6 = 85 . The answer is 85 <end>"),
)
GREEDY = {"17 + 25": 1.0, "38 + 46": 0.0}
PROMPT_ID = {"17 + 25": 412, "38 + 46": 97}


def make() -> dict[str, Any]:
    """The fields of the batch, rounded to four digits."""
    draw = random.Random(6)
    rows = [_row(draw, reward, text.split()) for _, reward, text in RESPONSES]
    batch: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    batch["rewards"] = [reward for _, reward, _ in RESPONSES]
    batch["group"] = [prompt for prompt, _, _ in RESPONSES]
    batch["greedy_rewards"] = [GREEDY[prompt] for prompt, _, _ in RESPONSES]
    batch["correct"] = [int(reward) for _, reward, _ in RESPONSES]
    batch["truncated"] = [int(text.endswith("…")) for _, _, text in RESPONSES]
    # An earlier policy, and what an environment adds: a turn per sentence, a critic's mark on the
    # answer, seconds.
    older = zip(batch["old_logp"], batch["ref_logp"])
    batch["prev_logp"] = [[round((a + b) / 2, 4) for a, b in zip(*pair)] for pair in older]
    gaps = zip(batch["old_logp"], batch["ref_logp"])
    batch["ref_kl"] = [[round(_spread(b - a), 4) for a, b in zip(*pair)] for pair in gaps]
    batch["prompt_id"] = [PROMPT_ID[prompt] for prompt, _, _ in RESPONSES]
    batch["turn"] = [_sentences(text.split()) for _, _, text in RESPONSES]
    batch["span_rewards"] = [_marks(text.split(), reward) for _, reward, text in RESPONSES]
    batch["duration"] = [round(0.4 + 0.05 * len(text.split()), 2) for _, _, text in RESPONSES]
    batch["void"] = [int(text.endswith("…")) for _, _, text in RESPONSES]
    return batch


def _spread(d: float) -> float:
    """e^d - 1 - d: a divergence that goes with this difference of log-probabilities."""
    return math.exp(d) - 1 - d


def _sentences(words: list[str]) -> list[int]:
    """Number of the sentence each token belongs to."""
    ends = [word == "." for word in words]
    return [sum(ends[:t]) for t in range(len(words))] + [0] * (TOKENS - len(words))


def _marks(words: list[str], reward: float) -> list[float]:
    """+1 or -1 on the answer, which stands before the end."""
    marks = [0.0] * TOKENS
    if words[-1] == "<end>":
        marks[len(words) - 2] = 1.0 if reward else -1.0
    return marks


def _row(draw: random.Random, reward: float, words: list[str]) -> dict[str, list[Any]]:
    n = len(words)
    # The learner has moved towards good answers on the whole, with exceptions.
    drift = draw.gauss(0.04 if reward else -0.04, 0.06)
    names = "logp mask old_logp ref_logp rollout_logp prox_logp entropy values old_values lag"
    row: dict[str, list[Any]] = {name: [] for name in names.split()}
    for t in range(n):
        # Most tokens are nearly certain; about one in four is a decision.
        old = -draw.expovariate(1.0) if draw.random() < 0.3 else -draw.expovariate(12.0)
        moved = drift + draw.gauss(0.0, 0.06 + 0.45 * min(-old, 1.0))  # most where it was unsure
        logp = min(old + moved, -0.0005)
        mismatch = draw.gauss(0.0, 0.6 if draw.random() < 0.04 else 0.015)
        value = 0.4 + (reward - 0.4) * 0.8 * t / n + draw.gauss(0.0, 0.06)
        row["logp"].append(logp)
        row["mask"].append(1)
        row["old_logp"].append(old)
        row["ref_logp"].append(min(old + draw.gauss(-0.02, 0.15), -0.0005))
        row["rollout_logp"].append(min(old + mismatch, -0.0005))
        row["prox_logp"].append(min(old + 0.6 * (logp - old) + draw.gauss(0.0, 0.02), -0.0005))
        row["entropy"].append(max(0.0, -1.1 * logp + abs(draw.gauss(0.0, 0.1))))
        row["values"].append(value)
        row["old_values"].append(value + draw.gauss(0.0, 0.04))
        row["lag"].append(2 if t < 12 else 1)  # the sampler's weights were renewed on the way
    padded = {k: [round(x, 4) for x in v] + [0] * (TOKENS - n) for k, v in row.items()}
    return {**padded, "tokens": words + [""] * (TOKENS - n)}


def render() -> str:
    """JSON with one response per line, so that a change can be read in a diff."""
    fields = []
    for name, value in make().items():
        lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in value)
        fields.append(f' "{name}": [\n{lines}\n ]')
    return "{\n" + ",\n".join(fields) + "\n}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=TARGET)
    parser.parse_args().file.write_text(render(), encoding="utf-8")
