"""Records the losses in tests/golden anew, on purpose: after a method's definition has changed.

    python scripts/write_golden.py [CASE...]     all cases, or those named

Refuses a value that the plain-loop reference does not give. `--batch` writes the batch as well.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from golden.golden import BATCH, compute, read_batch, write  # noqa: E402
from helpers import close, gradients, make_batch, with_leaves  # noqa: E402
from methods.cases import CASES  # noqa: E402

from proxpo.errors import nearest  # noqa: E402


def checked(case: str) -> dict:
    """Loss and gradients of a case, once the plain loops have agreed."""
    found, leaves = compute(case), with_leaves(read_batch())
    expected = CASES[case].reference(leaves)
    close(found["loss"], expected.detach(), rtol=1e-10)
    for name, grad in gradients(expected, leaves).items():
        close(found.get(f"d{name}", 0.0 * grad), grad, rtol=1e-10)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--batch", action="store_true", help="write the batch as well")
    asked = parser.parse_args()
    unknown = [name for name in asked.cases if name not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]}{nearest(unknown[0], CASES)}")
    if asked.batch:
        fields = {name: value.tolist() for name, value in make_batch(7, tokens=4).items()}
        BATCH.write_text(json.dumps(fields, indent=None).replace("], [", "],\n [") + "\n")
    for case in asked.cases or CASES:
        write(case, checked(case))
        print(case)


if __name__ == "__main__":
    main()
