"""docs/papers.md: settings of the papers' own runs as lines to paste, from docs/papers.yaml."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine_pages
import yaml
from method_pages import linked

from proxpo.recipes import method, methods

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs/papers.yaml"
WIDTH = 100  # of a line of code
ROWS = 8  # responses in a pass of TRL's trainer on one device
NAMES = {  # settings of the trainer and TRL's arguments of the same meaning
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "grad_clip": "max_grad_norm",
    "samples_per_prompt": "num_generations",
    "rollout.max_tokens": "max_completion_length",
    "temperature": "temperature",
    "top_p": "top_p",
    "steps": "max_steps",
    "warmup_steps": "warmup_steps",
    "lr_schedule": "lr_scheduler_type",
}


def runs() -> dict[str, dict[str, Any]]:
    """The table: slug -> {said, model, task, set}."""
    return yaml.safe_load(TABLE.read_text())


def settings(run: dict[str, Any]) -> list[str]:
    """The run's settings as KEY=VALUE."""
    return [f"{key}={_plain(value)}" for key, value in run["set"].items()]


def command(slug: str, run: dict[str, Any]) -> str:
    """A line for a shell."""
    model = f" --model {run['model']}" if "model" in run else ""
    sets = "".join(f" \\\n  --set {setting}" for setting in settings(run))
    return f"proxpo train --method {slug} --task {task(run)}{model}{sets}"


def task(run: dict[str, Any]) -> str:
    """The task of the line: GSM8K, or one that the method can play."""
    return str(run.get("task", "gsm8k"))


def trl_arguments(slug: str, run: dict[str, Any]) -> dict[str, Any]:
    """Arguments of GRPOConfig for one device."""
    chosen = dict(run["set"])
    args = {NAMES[k]: _number(v) for k, v in chosen.items() if k in NAMES}
    passes = chosen.get("updates_per_rollout", chosen.get("mini_batches", 1))
    cuts = chosen.get("mini_batches", 1)
    own = re.search(r"num_iterations=(\d+)", engine_pages.in_trl(slug))
    if passes > cuts or own:
        args["num_iterations"] = passes // cuts * (int(own[1]) if own else 1)
    if "samples_per_prompt" in chosen:
        rows = max(chosen.get("prompts_per_step", 1) * chosen["samples_per_prompt"], ROWS)
        args |= {
            "per_device_train_batch_size": ROWS,
            "steps_per_generation": rows // ROWS,
            "gradient_accumulation_steps": rows // ROWS // cuts,
        }
    return args


def recipe_options(run: dict[str, Any]) -> dict[str, Any]:
    """Options of the method among the run's settings."""
    chosen = run["set"].items()
    return {k.removeprefix("recipe."): _number(v) for k, v in chosen if k.startswith("recipe.")}


def trl_options(slug: str, run: dict[str, Any]) -> dict[str, Any]:
    """Options of the recipe in TRL, where some methods run without their schedule."""
    alone = "{'schedule': None}" in engine_pages.in_trl(slug)
    return {"schedule": None} if alone else recipe_options(run)


def in_trl(slug: str, run: dict[str, Any]) -> str:
    """Python for TRL, or the reason of the refusal."""
    verdict = engine_pages.in_trl(slug)
    if verdict.startswith("refused: "):
        return f"In TRL: no, {verdict.removeprefix('refused: ')}.\n"
    options = trl_options(slug, run)
    args = "".join(f"    {k}={_code(v)},\n" for k, v in trl_arguments(slug, run).items())
    recipe = f'proxpo.make_recipe("{slug}", {_code(options)})' if options else f'"{slug}"'
    given = ("model", "reward", "args=args", "train_dataset=data", f"recipe={recipe}")
    return (
        f'```python\nargs = GRPOConfig(\n    "runs/{slug}",\n{args})\n'
        f"{_call('trainer = ProxpoTrainer', given)}\n```\n"
    )


def _code(value: Any) -> str:
    return repr(value).replace("'", '"')


def _call(head: str, arguments: Sequence[str]) -> str:
    """A call as the formatter writes it: in one line, in three, or a line for each argument."""
    line = ", ".join(arguments)
    if len(head) + len(line) + 2 <= WIDTH:
        return f"{head}({line})"
    if len(line) + 4 <= WIDTH:
        return f"{head}(\n    {line}\n)"
    return f"{head}(\n" + "".join(f"    {each},\n" for each in arguments) + ")"


def page() -> str:
    """Text of docs/papers.md."""
    table = runs()
    sections = "\n".join(_section(slug, table[slug]) for slug in sorted(table))
    silent = [s for s in methods("language") if s not in table]
    none = ", ".join(f"[{slug}](methods/{slug}.md)" for slug in silent)
    return f"""# Papers and their settings

The settings of the papers' own runs, as far as papers and released scripts state them, as lines to
paste: for proxpo's trainer, mostly on GSM8K, and for TRL on one device (imports: `from trl import
GRPOConfig`, `from proxpo.adapters.trl import ProxpoTrainer`, `import proxpo`; `model`, `reward` and
`data` are yours). What is not stated is left at its default. Most of these runs took many GPUs:
smaller models and batches want rates of their own ([comparing](comparing.md)).

{sections}
## No settings known

For these no settings of a run on language models are stated in what we have read, or they are
those of another method on this page: {none}.
"""


def _section(slug: str, run: dict[str, Any]) -> str:
    paper = linked(method(slug).paper)
    return (
        f"## {slug}\n\n{paper}. {run['said'][:1].upper()}{run['said'][1:]}\n\n"
        f"```bash\n{command(slug, run)}\n```\n\n{in_trl(slug, run)}"
    )


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-6 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _plain(value: Any) -> str:
    number = _number(value)
    return f"{number:g}" if isinstance(number, float) else str(number)


__all__ = ["command", "page", "recipe_options", "runs", "settings", "trl_arguments", "trl_options"]
