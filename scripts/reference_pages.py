"""Pages of the reference, read off the code: settings of a run, command line, verl's settings.

docs/from-verl.md is written by hand but for its tables, between two marks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from proxpo.adapters.verl._counterparts import ACTOR_SETTINGS, ESTIMATORS, LOSS_MODES
from proxpo.adapters.verl._settings import METHOD_OPTIONS, STAGE_OPTIONS, option_of
from proxpo.cli.app import app
from proxpo.cli.training import ON_RESUME, opening
from proxpo.recipes import methods
from proxpo.report.text import setting_text
from proxpo.settings import make_recipe
from proxpo.train.config import explain, presets

ROOT = Path(__file__).resolve().parents[1]
START, END = (
    "<!-- verl settings: written by scripts/build_docs.py -->",
    "<!-- end of verl settings -->",
)


def pages() -> dict[Path, str]:
    """Text of every page, by path."""
    from_verl = ROOT / "docs/from-verl.md"
    head, _, rest = from_verl.read_text().partition(START)
    return {
        ROOT / "docs/reference/settings.md": settings_page(),
        ROOT / "docs/reference/cli.md": command_line_page(),
        from_verl: f"{head}{START}\n{verl_settings()}{END}{rest.partition(END)[2]}",
    }


def settings_page() -> str:
    """Every setting of `proxpo train`, by section, and the presets."""
    sections: dict[str, list[str]] = {}
    for setting in explain(None):
        section = setting.path.partition(".")[0] if "." in setting.path else "run"
        effect = ON_RESUME[setting.resume]
        default = setting_text(setting.value)
        row = f"| `{setting.path}` | `{default}` | {effect} | {cell(setting.doc)} |"
        sections.setdefault(section, []).append(row)
    heading = "| setting | default | on resume | meaning |\n| --- | --- | --- | --- |"
    tables = "\n\n".join(
        "\n".join([f"## {name}\n", heading, *rows]) for name, rows in sections.items()
    )
    named = "\n".join(
        f"| `{name}` | {cell(opening(path.read_text()))} |" for name, path in presets().items()
    )
    return f"""# Settings of a run

Every setting of `proxpo train`, in a YAML file or as `--set SETTING=VALUE`. `proxpo train
--explain` prints them with the values of a run. The last word is enough where it is unique:
`--set lr=1e-4`. Options of the method and other stages go the same way:
`--set clip_high=0.28 --set ratio=kalman`. In a file they stand under `recipe`, which belongs to
the file's method: with another `--method` it is left out, and the run says so.

*On resume*: the effect of a change when a run is continued.

{tables}

## Presets

`proxpo train NAME` runs one.

| preset | what it is |
| --- | --- |
{named}
"""


def command_line_page() -> str:
    """Every command, with its arguments and options, from the parser."""
    command: Any = typer.main.get_command(app)
    parts = [
        "# Command line\n\nEvery command of `proxpo` with its arguments and options. A mistake "
        "gives one line and exit code 2;\n1 stands for something that does not work, 130 for an "
        "interrupt.\n"
    ]
    for name, sub in command.commands.items():
        rows = "\n".join(_parameter(parameter) for parameter in sub.params)
        text = " ".join((sub.help or "").split())
        parts.append(
            f"## proxpo {name}\n\n{text}\n\n| argument | meaning |\n| --- | --- |\n{rows}\n"
        )
    return "\n".join(parts)


def _parameter(parameter: Any) -> str:
    options = [name for name in parameter.opts if name.startswith("-")]
    value = "" if getattr(parameter, "is_flag", False) else f" {parameter.metavar or 'TEXT'}"
    name = f"{', '.join(options)}{value}" if options else str(parameter.metavar or parameter.name)
    name = name.replace("|", " or ")  # a bar would end the table's cell
    default = parameter.default
    plain = isinstance(default, (str, int, float)) and not isinstance(default, bool)
    shown = f" Default: {default}." if plain and str(default) else ""
    return f"| `{name}` | {cell(parameter.help or '')}{shown} |"


def verl_settings() -> str:
    """verl's loss modes, estimators and actor settings, with what stands for each."""
    recipes = {slug: make_recipe(slug) for slug in methods("language")}
    rows = []
    for name, places in STAGE_OPTIONS.items():
        having = [f"`{slug}`" for slug, recipe in recipes.items() if option_of(recipe, name)]
        shown = ", ".join(having[:6]) + (f" and {len(having) - 6} more" if len(having) > 6 else "")
        options = ", ".join(f"`{place}`" for place in places) or "none: refused"
        short = ", ".join(f"`{option}`" for option in METHOD_OPTIONS.get(name, ()))
        rows.append(f"| `actor.{name}` | {options} | {short} | {shown} |")
    table = "\n".join(rows)
    stays: dict[str, list[str]] = {}
    for name, text in ACTOR_SETTINGS.items():
        stays.setdefault(text, []).append(f"`{name}`")
    kept = "\n".join(f"| {', '.join(names)} | {text} |" for text, names in stays.items())
    return f"""
## Which loss is mine?

| `policy_loss.loss_mode` in verl | here |
| --- | --- |
{_two(LOSS_MODES)}

| `algorithm.adv_estimator` in verl | under a loss mode of ours |
| --- | --- |
{_two(ESTIMATORS)}

## Which setting is which option?

A value that differs from verl's default sets the method's own number, or is refused where the
method has no such number. verl's defaults leave the method's numbers in force, and a line names
both.

| below `actor_rollout_ref` | option of a stage | as an option of a method | methods that have it |
| --- | --- | --- | --- |
{table}

All other settings of the actor, FSDP's included:

| below `actor_rollout_ref.actor` | under a loss mode of ours |
| --- | --- |
{kept}

"""


def _two(table: Mapping[str, str]) -> str:
    return "\n".join(f"| `{name}` | {text} |" for name, text in table.items())


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
