"""Checks the gradient transforms on every causal language model and writes docs/models.md.

    python scripts/model_conformance.py            # all, a few minutes on one core
    python scripts/model_conformance.py llama mamba   # some, printed only

Ends with status 1 if a model has a wrong gradient or crashes.
"""

import argparse
import re
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "gradients"))

import conformance  # noqa: E402
from conformance import Result  # noqa: E402

PAGE = """# Models under the gradient transforms

Every model type of `AutoModelForCausalLM` in transformers {version}, built tiny (two layers, or one
of each kind), against brute force in float64: `isopo` (p = -1, overlap "all"), `isopo-ntk` and
p = 0. Written by `make models`; a sample of it is part of `make test`.

{counts}

**exact**: every parameter agrees to {tolerance:.0e} of the length of its gradient; the column gives
the largest difference. Some parameters have no per-sequence form (those of state space mixers,
convolutions, learned scales): the transform says so in a warning and gives them Σ_i A_i V_i, which
is what they are compared with; they are named in the last column. **refused**: the block ends with
the error quoted. **not built**: no tiny configuration was found, or the model does not give one
logit vector per input token; the reason is transformers' own.

| model type | outcome | difference | without normalisation, or the reason |
| --- | --- | --- | --- |
{rows}
"""


def row(result: Result) -> str:
    error = f"{max(result.errors.values()):.0e}" if result.errors else ""
    what = result.detail
    if result.status == "exact":
        names = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in result.unnormalised)
        what = ", ".join(f"`{name}`" for name in names)
    else:
        what = what.removeprefix("gradients.applied: ")
    return f"| {result.kind} | {result.status} | {error} | {what.replace('|', '/')} |"


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    results = []
    for result in conformance.run(names or conformance.kinds()):
        print(row(result), flush=True)
        results.append(result)
    counts = Counter(result.status for result in results)
    if not names:
        page = PAGE.format(
            version=transformers.__version__,
            counts=", ".join(f"{number} {status}" for status, number in counts.most_common()) + ".",
            tolerance=conformance.TOLERANCE,
            rows="\n".join(map(row, results)),
        )
        (ROOT / "docs" / "models.md").write_text(page)
    return int(bool(counts["wrong"] or counts["crashed"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    sys.exit(main(parser.parse_args().models))
