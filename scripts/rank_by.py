"""Ranks a finished comparison by another metric of its runs, on the seeds that it reports.

    python scripts/rank_by.py comparisons/hot proxpo/eval/accuracy

Settings stay as they were chosen, by the comparison's own score. Nothing is written.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from proxpo.report.analysis import analyse
from proxpo.report.findings import claims, ranking_heading, ranking_lines
from proxpo.report.read_runs import read_comparison
from proxpo.report.terminal import until_reader_leaves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("comparison", type=Path)
    parser.add_argument("metric", nargs="?", default="proxpo/eval/accuracy")
    args = parser.parse_args()
    comparison = replace(read_comparison(args.comparison), score=args.metric)
    known = sorted({name for run in comparison.runs for row in run.rows for name in row})
    if args.metric not in known:
        parser.error(f"no run has {args.metric}; there are {', '.join(known)}")
    analysis = analyse(comparison)
    print(ranking_heading(analysis))
    print("\n".join([*ranking_lines(analysis), *claims(analysis)]))
    if not analysis.variant.share:
        print('"Beats" says larger here, which need not be better.')


if __name__ == "__main__":
    with until_reader_leaves():
        main()
