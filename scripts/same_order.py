"""Does one study order its arms as another does? Spearman's rank correlation over the arms of both.

    cd docs/results
    python ../../scripts/same_order.py hot worked-hot,worked-hot/more
    python ../../scripts/same_order.py sizes/box sizes/large kl

Reads the summary.json of each folder, or a summary given by name; what a comma joins counts as one
study. The interval comes from drawing the seeds of every arm anew, with replacement: it says how
much of the order is chance of the seeds, and is no test. Nothing is written.
"""

import argparse
from collections.abc import Sequence

import numpy as np
from across import study_by_seed
from scipy.stats import rankdata, spearmanr

from proxpo.report.terminal import until_reader_leaves

DRAWS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", metavar="FOLDER[,FOLDER]")
    parser.add_argument("second", metavar="FOLDER[,FOLDER]")
    parser.add_argument("measure", nargs="?", default="final", help="as of across.py")
    args = parser.parse_args()
    first, second = (_arms(parser, text, args.measure) for text in (args.first, args.second))
    both = [name for name in first if name in second]
    if len(both) < 3:
        parser.error(f"arms in common: {len(both)}; an order needs three")
    studies = [[arms[name] for name in both] for arms in (first, second)]
    means = [np.array([values.mean() for values in arms]) for arms in studies]
    places = [rankdata(-values, method="min").astype(int) for values in means]
    for k in np.argsort(places[0], kind="stable"):
        print(
            f"{places[0][k]:3d} {means[0][k]:.4f}   {places[1][k]:3d} {means[1][k]:.4f}   {both[k]}"
        )
    generator = np.random.default_rng(0)
    drawn = [
        _agreement(*([generator.choice(v, len(v)).mean() for v in arms] for arms in studies))
        for _ in range(DRAWS)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    print(
        f"rank correlation of '{args.measure}' over {len(both)} arms: {_agreement(*means):.2f} "
        f"(95 % of the draws of seeds: {low:.2f} to {high:.2f})"
    )


def _agreement(first: Sequence[float], second: Sequence[float]) -> float:
    return float(spearmanr(first, second).statistic)


def _arms(parser: argparse.ArgumentParser, text: str, measure: str) -> dict[str, np.ndarray]:
    """The measure of every arm of a study, one number a seed; without arms that have none."""
    arms = study_by_seed(parser, text, measure)
    return {name: np.array(list(values.values())) for name, values in arms.items() if values}


if __name__ == "__main__":
    with until_reader_leaves():
        main()
