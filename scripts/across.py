"""Difference between an arm of one finished comparison and an arm of another, paired over seeds.

    python scripts/across.py "comparisons/sgd:isopo p=-1" comparisons/fresh:reinforce

The two studies must share seeds, task and end, which nobody planned and nothing here checks: what
comes out is a remark, not a test. Nothing is written.
"""

import argparse
from dataclasses import replace

from proxpo.report.analysis import Analysis, ArmResult, analyse, paired_difference
from proxpo.report.read_runs import read_comparison


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", metavar="FOLDER:ARM")
    parser.add_argument("second", metavar="FOLDER:ARM")
    parser.add_argument("metric", nargs="?", help="of the runs; else the first comparison's score")
    args = parser.parse_args()
    named = [text.rpartition(":")[::2] for text in (args.first, args.second)]
    comparisons = [read_comparison(folder) for folder, _ in named]
    metric = args.metric or comparisons[0].score
    found = [
        _arm(parser, analyse(replace(comparison, score=metric)), arm)
        for comparison, (_, arm) in zip(comparisons, named)
    ]
    difference = paired_difference(*found, "final")
    for text, result in zip((args.first, args.second), found):
        print(f"{text}: {metric} {result.mean('final'):.4f}")
    interval = difference.student
    print(
        f"first minus second: {interval.mean:+.4f} (95 % interval {interval.low:+.4f} to "
        f"{interval.high:+.4f}, {difference.seeds} paired seeds)"
    )


def _arm(parser: argparse.ArgumentParser, analysis: Analysis, name: str) -> ArmResult:
    names = [result.arm.name for result in analysis.arms]
    if name not in names:
        parser.error(f"no arm '{name}'; there are {', '.join(names)}")
    return analysis.result(name)


if __name__ == "__main__":
    main()
