"""Difference between an arm of one finished comparison and an arm of another, paired over seeds.

    python scripts/across.py "docs/results/sgd:isopo p=-1" docs/results/fresh:reinforce
    python scripts/across.py docs/results/worked-hot/more:cispo docs/results/worked-hot:reinforce kl

Reads the summary.json of each, so that published results serve as well as runs. The two studies
must share seeds, task and end, which nobody planned and nothing here checks: what comes out is a
remark, not a test. Nothing is written.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from proxpo.report.statistics import paired
from proxpo.report.terminal import until_reader_leaves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", metavar="FOLDER:ARM")
    parser.add_argument("second", metavar="FOLDER:ARM")
    parser.add_argument(
        "measure",
        nargs="?",
        default="final",
        help="final: the score; final_other: the accuracy that does not rank; kl; area",
    )
    args = parser.parse_args()
    first, second = (_by_seed(parser, text, args.measure) for text in (args.first, args.second))
    seeds = sorted(first.keys() & second.keys())
    if len(seeds) < 2:
        parser.error(f"seeds in common: {len(seeds)}; a difference needs two")
    pair = [np.array([values[seed] for seed in seeds]) for values in (first, second)]
    for text, values in zip((args.first, args.second), pair):
        print(f"{text}: {args.measure} {values.mean():.4f}")
    difference = paired(*pair).student
    print(
        f"first minus second: {difference.mean:+.4f} (95 % interval {difference.low:+.4f} to "
        f"{difference.high:+.4f}, {len(seeds)} paired seeds)"
    )


def _by_seed(parser: argparse.ArgumentParser, text: str, measure: str) -> dict[int, float]:
    """The measure of an arm, by seed."""
    place, _, name = text.rpartition(":")
    arms = read_arms(parser, place)
    if name not in arms:
        parser.error(f"no arm '{name}'; there are {', '.join(arms)}")
    return by_seed(parser, place, arms[name], measure)


def read_arms(parser: argparse.ArgumentParser, place: str) -> dict[str, list[dict[str, Any]]]:
    """What a summary says of every seed of every arm; `place`: its folder or the file."""
    path = Path(place) if place.endswith(".json") else Path(place) / "summary.json"
    if not path.is_file():
        parser.error(f"no {path}: `proxpo report {path.parent}` writes it")
    return {arm["arm"]: arm["seeds"] for arm in json.loads(path.read_text())["arms"]}


def by_seed(
    parser: argparse.ArgumentParser, place: str, seeds: list[dict[str, Any]], measure: str
) -> dict[int, float]:
    """One measure of an arm, by seed."""
    if any(measure not in seed for seed in seeds):
        known = [key for key in seeds[0] if key != "seed"]
        parser.error(f"{place} has no '{measure}' of each seed; there are {', '.join(known)}")
    return {seed["seed"]: seed[measure] for seed in seeds if seed[measure] is not None}


def study_by_seed(
    parser: argparse.ArgumentParser, text: str, measure: str
) -> dict[str, dict[int, float]]:
    """One measure of every arm of a study, by seed; a comma joins the folders of one study."""
    found: dict[str, dict[int, float]] = {}
    for place in text.split(","):
        for name, seeds in read_arms(parser, place).items():
            if name in found:
                parser.error(f"arm '{name}' is in {place} and in a folder before it")
            found[name] = by_seed(parser, place, seeds, measure)
    return found


if __name__ == "__main__":
    with until_reader_leaves():
        main()
