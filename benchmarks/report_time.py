"""Seconds and megabytes of a comparison's page: eight methods, five seeds, a thousand steps each.

    python benchmarks/report_time.py
    python benchmarks/report_time.py --steps 5000

The runs are made up from a seeded generator, in the format that `proxpo compare` leaves.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "report"))
import made

from proxpo.report.analysis import analyse
from proxpo.report.comparison_report import write_report
from proxpo.report.read_runs import read_comparison


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    arms = {f"method-{i}": 0.2 + 0.015 * i for i in range(8)}
    with tempfile.TemporaryDirectory() as folder:
        made.comparison(Path(folder), arms=arms, seeds=range(5), steps=args.steps)
        started = time.process_time()
        runs = read_comparison(Path(folder))
        read = time.process_time()
        found = analyse(runs)
        analysed = time.process_time()
        page = write_report(found, Path(folder))
        written = time.process_time()
        print(
            f"40 runs of {args.steps} steps: read {read - started:.1f} s, analysed "
            f"{analysed - read:.1f} s, written {written - analysed:.1f} s of one processor; "
            f"{page.stat().st_size / 1e6:.2f} MB"
        )


if __name__ == "__main__":
    main()
