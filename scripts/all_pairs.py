"""All pairs of arms of finished comparisons, with Holm's correction for their number.

    cd docs/results
    python ../../scripts/all_pairs.py chain-hot,chain-hot/cispo,chain-hot/more
    python ../../scripts/all_pairs.py chain-hot,chain-hot/cispo,chain-hot/more kl

Reads the summary.json of each folder; what a comma joins counts as one comparison. Prints the pairs
whose difference is shown: the arm with more, the one with less, the difference with its interval,
and Holm's p-value where it is below 0.05. As with across.py the folders must share seeds, task and
end, which nothing here checks. Nothing is written.
"""

import argparse
from itertools import combinations

import numpy as np
from across import study_by_seed

from proxpo.report.statistics import Difference, holm, paired
from proxpo.report.terminal import until_reader_leaves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", metavar="FOLDER[,FOLDER]")
    parser.add_argument("measure", nargs="?", default="final", help="as of across.py")
    args = parser.parse_args()
    arms = study_by_seed(parser, args.study, args.measure)
    arms = dict(sorted(arms.items(), key=lambda arm: -_mean(arm[1])))
    pairs = [(a, b) for a, b in combinations(arms, 2) if len(arms[a].keys() & arms[b].keys()) > 1]
    if not pairs:
        parser.error("no two arms have two seeds in common")
    differences = [_difference(arms[a], arms[b]) for a, b in pairs]
    corrected = holm([difference.p for difference in differences])
    rows = [row for row in zip(pairs, differences, corrected) if row[1].decides]
    for (a, b), difference, p in sorted(rows, key=lambda row: row[2]):
        d = difference.student
        verdict = f"Holm's p {p:.4f}" if p < 0.05 else "not after correction"
        print(f"{a} - {b}: {d.mean:+.4f} ({d.low:+.4f} to {d.high:+.4f}), {verdict}")
    held = sum(p < 0.05 for p in corrected)
    print(f"'{args.measure}' of {len(arms)} arms, {len(pairs)} pairs: {held} hold after correction")


def _mean(by_seed: dict[int, float]) -> float:
    return float(np.mean(list(by_seed.values()))) if by_seed else float("-inf")


def _difference(first: dict[int, float], second: dict[int, float]) -> Difference:
    seeds = sorted(first.keys() & second.keys())
    return paired(*(np.array([values[seed] for seed in seeds]) for values in (first, second)))


if __name__ == "__main__":
    with until_reader_leaves():
        main()
