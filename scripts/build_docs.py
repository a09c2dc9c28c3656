"""Writes the pages read off the code: docs/methods, docs/pictures, docs/gallery.md,
docs/papers.md, docs/stages.md, docs/fields.md, docs/trl-arguments.md, docs/engines.md,
docs/reference, the tables of docs/choose.md; the tutorials, with the output of a run; the tables
and figures of speed, from what the benchmarks have measured (speed_pages.py), and those of
docs/results/why.md, claims.md and README's front (evidence_pages.py).

    python scripts/build_docs.py           write them
    python scripts/build_docs.py --check   fail if a committed page differs from the code

A method's page is made of its docstring, its options, its stages and the statements its tests
prove (`@pytest.mark.checks("slug", "statement")`), so none of them can say something else.
Pictures of another machine may differ by a tenth of a pixel.
"""

import argparse
import ast
import inspect
import re
import sys
import warnings
from pathlib import Path

import engine_pages
import evidence_pages
import method_pages
import paper_pages
import reference_pages
import speed_pages
import tutorial_pages
from method_pages import cell as _cell

from proxpo import fields, sparsity
from proxpo.cli.choosing import choice_table, short_table
from proxpo.fields import CORE, FIELDS
from proxpo.ops import kl
from proxpo.recipes import methods
from proxpo.settings import make_recipe
from proxpo.stages import STAGES, aggregate, load_stages
from proxpo.train._settings import TRL_NAMES
from proxpo.train.config import explain

ROOT = Path(__file__).resolve().parents[1]
DOMAINS = {
    "language": "Language models",
    "test time": "Test time",
    "control": "Control",
    "architecture": "Architectures",
    "generative models": "Generative models",
    "energies": "Energies",
}
CHOOSE = ROOT / "docs/choose.md"
FROM_TRL = ROOT / "docs/from-trl.md"
LOSSES = "<!-- losses: written by scripts/build_docs.py -->", "<!-- end of losses -->"
IN_SHORT = "<!-- in short: written by scripts/build_docs.py -->", "<!-- end of in short -->"
CHOICES = "<!-- choices: written by scripts/build_docs.py -->", "<!-- end of choices -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    wanted = pages()
    stale = [path for path, text in wanted.items() if not _same(path, text)]
    orphans = sorted(set((ROOT / "docs/methods").glob("*.md")) - set(wanted))
    for path in [*stale, *orphans]:
        print(f"{path.relative_to(ROOT)}: {'out of date' if path in stale else 'no such method'}")
        if not check:
            _write(path, wanted.get(path))
    figures = [*speed_pages.stale_figures(), *evidence_pages.stale_figures()]
    for path in figures:
        print(f"{path.relative_to(ROOT)}: drawn from other figures")
        if not check:
            pages_of = evidence_pages if path in evidence_pages.figures() else speed_pages
            pages_of.draw(path, pages_of.figures()[path])
    pictures = method_pages.stale_pictures()
    for path in pictures:
        print(f"{path.relative_to(ROOT)}: not what the code draws")
        if not check:
            method_pages.write_picture(path)
    return 1 if check and (stale or orphans or figures or pictures) else 0


def pages() -> dict[Path, str]:
    """Text of every generated file, by path."""
    tested = tested_statements()
    out = {
        ROOT / f"docs/methods/{m.slug}.md": method_pages.page(m, _tested(m.slug, tested))
        for m in methods().values()
    }
    out[ROOT / "docs/gallery.md"] = method_pages.gallery()
    out[ROOT / "docs/papers.md"] = paper_pages.page()
    out[ROOT / "docs/methods/kl-estimators.md"] = shared_page(
        "kl-estimators", [kl, kl.kl_estimate], tested
    )
    measures = [sparsity.compare, sparsity.overlap, sparsity.train_only]
    out[ROOT / "docs/methods/sparse-updates.md"] = shared_page(
        "sparse-updates", [sparsity, *measures], tested
    )
    modes = [factory for _, factory in sorted(STAGES["aggregate"].items())]
    out[ROOT / "docs/methods/aggregation.md"] = shared_page(
        "aggregation", [aggregate, *modes], tested
    )
    out[ROOT / "docs/stages.md"] = stages_page()
    out[ROOT / "docs/fields.md"] = fields_page()
    out[ROOT / "docs/trl-arguments.md"] = trl_arguments_page()
    out[ROOT / "docs/engines.md"] = engine_pages.page()
    out |= speed_pages.pages()
    out |= evidence_pages.pages()
    out[ROOT / "docs/methods/README.md"] = catalogue()
    out |= reference_pages.pages()
    out |= tutorial_pages.pages()
    short = between(CHOOSE.read_text(), *IN_SHORT, short_table())
    out[CHOOSE] = between(short, *CHOICES, choice_table())
    out[FROM_TRL] = between(FROM_TRL.read_text(), *LOSSES, trl_losses())
    return out


def between(page: str, start: str, end: str, text: str) -> str:
    """The page with `text` between two markers."""
    head, _, rest = page.partition(start)
    return f"{head}{start}\n{text}{end}{rest.partition(end)[2]}"


def shared_page(slug: str, parts: list, tested: dict[str, list[str]]) -> str:
    """A page for something many methods use, from the docstrings of its module and functions."""
    module, *functions = parts
    texts = [f"# {slug}\n\n```text\n{inspect.getdoc(module)}\n```\n"]
    for part in functions:
        signature = _signature(part)
        texts.append(f"## {part.__name__}{signature}\n\n```text\n{inspect.getdoc(part)}\n```\n")
    return "\n".join([*texts, _tested(slug, tested)])


def tested_statements() -> dict[str, list[str]]:
    """slug -> statements of the tests marked `checks(slug, statement)`."""
    statements: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        named = _constants(tree)
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) == "pytest.mark.checks":
                slug, statement = (_value(argument, named) for argument in call.args)
                if slug is not None and statement is not None:
                    statements.setdefault(slug, []).append(statement)
    return statements


def _constants(tree: ast.Module) -> dict[str, str]:
    """Strings that a file gives a name to: NAME = "..."."""
    return {
        line.targets[0].id: line.value.value
        for line in tree.body
        if isinstance(line, ast.Assign)
        and isinstance(line.targets[0], ast.Name)
        and isinstance(line.value, ast.Constant)
    }


def _value(argument: ast.expr, named: dict[str, str]) -> str | None:
    """A string as written or as named; None for one that is made when the test runs."""
    if isinstance(argument, ast.Name):
        return named.get(argument.id)
    return argument.value if isinstance(argument, ast.Constant) else None


def stages_page() -> str:
    load_stages()
    parts = [
        "# Stages\n\nThe parts that methods are made of, by kind, with their options; how they fit "
        "together:\n[stages and recipes](concepts/recipes.md). To swap one in: "
        "`--set KIND=NAME --set KIND.OPTION=VALUE`.\n"
    ]
    for kind, made in STAGES.items():
        if made:
            parts.append(f"## {kind}\n")
        for name, factory in sorted(made.items()):
            parts.append(
                f"### {name}{_signature(factory)}\n\n```text\n{inspect.getdoc(factory)}\n```\n"
            )
    return "\n".join(parts)


def fields_page() -> str:
    """All batch fields as declared; those of stages come last, by name."""
    load_stages()
    core = [field for name, field in FIELDS.items() if name in CORE]
    extra = [FIELDS[name] for name in sorted(FIELDS.keys() - CORE)]
    heading = ["| field | axes | kind | source | |", "| --- | --- | --- | --- | --- |"]
    rows = [
        f"| `{field.name}` | {field.axes} | {field.kind} | {field.source} | {_cell(field.doc)} |"
        for field in (*core, *extra)
    ]
    text = inspect.cleandoc(fields.__doc__ or "")
    return "\n".join(["# Batch fields", "", "```text", text, "```", "", *heading, *rows, ""])


def trl_arguments_page() -> str:
    """The arguments of TRL, with the recipe options that stand for them under recipe grpo."""
    from trl import GRPOConfig

    from proxpo.adapters.trl import _arguments as trl

    def decided(name: str, argument: trl.Argument) -> str:
        recipe = make_recipe("grpo")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # some arguments go in TRL 2
            args = GRPOConfig("unused", use_cpu=True, bf16=False, **{name: argument.example})
        if trl.agrees(recipe, name, args):
            return argument.text
        return trl.suggestion(recipe, name, args)

    def rows(rule: str) -> str:
        by_text: dict[str, list[str]] = {}
        for name, argument in trl.ARGUMENTS.items():
            if argument.rule == rule == "recipe":
                text, name = decided(name, argument), f"{name}={argument.example!r}"
            else:
                text = argument.text
            if argument.rule == rule:
                by_text.setdefault(_cell(_code(text)), []).append(f"`{name}`")
        return "\n".join(f"| {', '.join(names)} | {text} |" for text, names in by_text.items())

    own = {setting.path: setting.doc for setting in explain(None)}
    train = "\n".join(
        f"| `{name}` | `{path}` | {_cell(own[path])} |" for name, path in TRL_NAMES.items()
    )
    texts = {n: text for n, text in trl.TRAINER_ARGUMENTS.items() if text}
    trainer = "\n".join(f"| `{name}` | {text} |" for name, text in texts.items())
    return f"""# Arguments of TRL under a recipe

`ProxpoTrainer` takes the arguments of `GRPOTrainer` and a `GRPOConfig`. Each one counts as in TRL,
or is refused with the recipe options that do the same. `tests/adapters/trl/test_trl_arguments.py`
tests every argument beside TRL's own trainer.

## The recipe decides

A value that the recipe has already is accepted. Another value is refused with the options that set
it, shown here for recipe `grpo`. A default of TRL looks the same as a value that was written down:
so a default that differs from the recipe has no effect, and one line at the start names it.

| argument | under recipe grpo |
| --- | --- |
{rows("recipe")}

With `entropy_coef` in the GRPOConfig as well as in the recipe, the bonus is TRL's, a mean over the
tokens of a micro-batch; in the recipe alone it is averaged as the recipe's loss. In the same way
`beta` corrects the KL term of recipe `vespo` by TRL's ratio, that of a token. Where the recipe has
the `loss_type` (dapo, cispo, vespo), an optimizer step divides by its share of the tokens of the
whole generation batch, as TRL's. Each `loss_type`: [from TRL](from-trl.md#which-recipe-is-my-loss).

## Refused

| argument | reason |
| --- | --- |
{rows("none")}

## TRL's

| argument | effect |
| --- | --- |
{rows("TRL")}

Arguments inherited from `TrainingArguments` are the Trainer's. `gradient_accumulation_steps` must
divide `steps_per_generation`; with a gradient transform `fp16` is refused, and so are optimizers
that move the weights inside the backward pass (LOMO, GaLore and APOLLO by layer). All arguments of
`GRPOTrainer` are TRL's too:

| argument | beside its effect in TRL |
| --- | --- |
{trainer}

## In proxpo's own trainer

Options of a recipe are settings there as well: `--set kl_coef=0.04`. `proxpo train` counts prompts
where TRL counts completions, rollouts where TRL's `max_steps` counts optimizer steps, and optimizer
steps on a rollout where TRL's `num_iterations` counts passes.

| `GRPOConfig` | `proxpo train` | meaning there |
| --- | --- | --- |
{train}
"""


def trl_losses() -> str:
    """TRL's loss types, with the recipe of each."""
    from proxpo.adapters.trl._arguments import LOSS_TYPES

    rows = [f"| `{name}` | {_code(text)} |" for name, text in LOSS_TYPES.items()]
    return "\n".join(["", "| `loss_type` in TRL | here |", "| --- | --- |", *rows, "", ""])


def _code(text: str) -> str:
    """The text with its settings, {...} or name=value, as code."""
    return re.sub(r"\{[^}]*\}|\b\w+=('[^']*'|\w+)", r"`\g<0>`", text)


def catalogue() -> str:
    """Page of all methods, by what they are for."""
    parts = [
        """# Catalogue

Every method in one line; its page has the formula, the departures from the paper, the options and
the stages. *Written from*: the code or formulas that it is held against; what is reconstructed
filled gaps of its paper. `proxpo methods` prints the same list.
"""
    ]
    heading = ["| method | what it does | paper | written from |", "| --- | --- | --- | --- |"]
    for domain, title in DOMAINS.items():
        rows = [
            f"| [`{m.slug}`]({m.slug}.md) | {_cell(_after_colon(m.summary))} | {m.paper} | "
            f"{m.confidence} |"
            for m in methods().values()
            if m.domains[0] == domain
        ]
        parts.append("\n".join([f"## {title}\n", *heading, *rows, ""]))
    return "\n".join(parts)


def _tested(slug: str, tested: dict[str, list[str]]) -> str:
    statements = "\n".join(f"- {statement}" for statement in tested.get(slug, []))
    return f"## What the tests prove\n\n{statements}\n" if statements else ""


def _signature(factory) -> str:
    names = ", ".join(
        name if p.default is p.empty else f"{name}={p.default!r}"
        for name, p in inspect.signature(factory).parameters.items()
    )
    return f"({names})"


def _after_colon(summary: str) -> str:
    return summary.partition(": ")[2] or summary


def _same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


def _write(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
