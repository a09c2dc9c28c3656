"""docs/methods/NAME.md, docs/pictures/NAME.svg and docs/gallery.md, from the catalogue."""

import functools
import re
from pathlib import Path

import engine_pages

from proxpo.pictures import panels
from proxpo.pictures._svg import caption_of, draw_svg, same_picture
from proxpo.recipes import Method, methods
from proxpo.stages.schedule import variants
from proxpo.train.domains import DOMAINS, TEST_TIME
from proxpo.types import KINDS, Recipe

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs/pictures"
CONTINUOUS = "gym:Pendulum-v1"  # AVG takes continuous actions alone


@functools.cache
def drawn(slug: str) -> tuple[str, str]:
    """The picture of a method and its caption."""
    made, name = panels(slug)
    return draw_svg(made, name), caption_of(made)


def stale_pictures() -> list[Path]:
    """Pictures that differ from those that the code draws, or that belong to no method."""
    wanted = {PICTURES / f"{slug}.svg": slug for slug in methods()}
    differing = [
        path
        for path, slug in wanted.items()
        if not (path.exists() and same_picture(path.read_text(), drawn(slug)[0]))
    ]
    return [*differing, *sorted(set(PICTURES.glob("*.svg")) - set(wanted))]


def write_picture(path: Path) -> None:
    """Draws the picture anew; deletes the file of a method that is gone."""
    if path.stem not in methods():
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(drawn(path.stem)[0])


def page(method: Method, statements: str) -> str:
    """The page of one method."""
    body, departures, reference = split_docstring(method.prose)
    title, _, rest = body.partition("\n")
    explained = method.explained()
    options = "\n".join(
        f"| `{k}` | `{cell(repr(v))}` | {cell(explained[k])} |" for k, v in method.defaults.items()
    )
    made = method.make()
    return f"""# {method.slug}

{title}

![{method.slug}: weights](../pictures/{method.slug}.svg)

*{drawn(method.slug)[1]}*

**How it differs from the paper and its neighbours.** {departures or "No departure is known."}

```text
{rest.strip(chr(10))}
```

Source: {linked(reference)}. How sure we are: {method.confidence}.

{usage(method)}
## Options

| option | default | meaning |
| --- | --- | --- |
{options}

{stages(made) if isinstance(made, Recipe) else ""}
{statements}"""


def usage(method: Method) -> str:
    """Lines that run the method in a loop of one's own, in TRL, in verl and in the trainer."""
    slug, domains = method.slug, method.domains
    made = method.make()
    rows = []
    if isinstance(made, Recipe) and "language" in domains:
        rows.append(("own loop", own_loop(made)))
        rows += [("TRL", in_trl(slug)), ("verl", in_verl(slug))]
    else:
        why = f"for {' and '.join(domains)}, not for language models"
        if domains == (TEST_TIME,):
            why = "adapts a frozen model to one problem at a time: nothing is trained"
        rows += [("own loop, TRL, verl", why)]
    rows.append(("command line", f"`{command(method)}`"))
    lines = "\n".join(f"| {home} | {text} |" for home, text in rows)
    return f"## Use\n\n| in | |\n| --- | --- |\n{lines}\n"


def command(method: Method) -> str:
    """The shortest command that runs the method."""
    if method.domains == (TEST_TIME,):
        return f"proxpo adapt {method.slug}"
    if "language" in method.domains:
        return f"proxpo train --method {method.slug}"
    task = CONTINUOUS if method.slug == "avg" else example_task(method.domains[0])
    return f"proxpo train --method {method.slug} --task {task}"


def example_task(domain: str) -> str:
    return next(each.example for each in DOMAINS if each.name == domain)


def own_loop(recipe: Recipe) -> str:
    line = f'`loss, metrics = proxpo.loss_fn("{recipe.name}")(batch)`'
    if recipe.gradient is not None:
        return (
            f'`recipe = proxpo.make_recipe("{recipe.name}"); transform = recipe.gradient.apply()`, '
            "[the backward pass](../../examples/own_loop.py)"
        )
    fields = ", ".join(f"`{name}`" for name in sorted(recipe.needs()))
    return f"{line} with {fields}"


def in_trl(slug: str) -> str:
    verdict = engine_pages.in_trl(slug)
    if verdict.startswith("refused: "):
        return f"no: {verdict.removeprefix('refused: ')}"
    needs = verdict.removeprefix("runs").removeprefix(" ").removeprefix("; ")
    made = re.search(r"\{.*?\}", needs)
    recipe = f'proxpo.make_recipe("{slug}", {made[0]})' if made else f'"{slug}"'
    note = f" ({needs})" if needs and not made else ""
    return f"`ProxpoTrainer(model, reward, args=args, train_dataset=data, recipe={recipe})`{note}"


def in_verl(slug: str) -> str:
    verdict = engine_pages.in_verl(slug)
    if verdict.startswith("refused: "):
        return f"no: {verdict.removeprefix('refused: ')}"
    name = f"proxpo_{slug.replace('-', '_')}"
    line = f"algorithm.adv_estimator={name} actor_rollout_ref.actor.policy_loss.loss_mode={name}"
    if verdict == "engine":
        return f"`VERL_ENGINE_VENDOR=proxpo ... actor_rollout_ref.actor.strategy=fsdp2 {line}`"
    return f"`{line}`"


def stages(recipe: Recipe) -> str:
    rows = "\n".join(
        f"| {place.split('.')[0]} | `{cell(str(stage))}` |" for place, stage in recipe.stages()
    )
    losses = variants(recipe) or ()
    passes = f"\nRun as {len(losses)} passes over each batch.\n" if len(losses) > 1 else ""
    return f"| stage | default |\n| --- | --- |\n{rows}\n{passes}"


def gallery() -> str:
    """docs/gallery.md: a list that gallery.js turns into a grid with filters."""
    entries = "\n".join(_entry(method) for method in methods().values())
    return f"""# Gallery

What every method does with a token, drawn from the code by `proxpo methods NAME --picture FILE`.

*Left*: the weight of one token's gradient over its ratio π/π_old. Blue, A > 0: a step makes the
token likelier. Orange, A < 0: less likely. On the line at 0 the token is not trained on. 1 is its
weight at ratio 1. Where the weight depends on the whole response, the solid curve moves a single
token and the dashed one all 1,000 tokens of a response together.

*Right*: the weight of every token of the [sample batch](reference/files.md#a-batch), two prompts
with four responses each; a number is the response's reward. Where a method acts around its loss (a
gradient transform, a schedule, a budget), or trains no language model, that is drawn instead.

{entries}

<script src="gallery.js"></script>
"""


def _entry(method: Method) -> str:
    made = method.make()
    parts = [f"`{kind}={stage.name}`" for kind, stage in _kinds(made)]
    summary = method.summary.partition(": ")[2] or method.summary
    link = f"methods/{method.slug}.md"
    text = " ".join(parts) or f"`for={method.domains[0]}`"
    return (
        f"- [![{method.slug}](pictures/{method.slug}.svg)]({link}) **[{method.slug}]({link})** "
        f"{summary[:1].upper()}{summary[1:]} {text}"
    )


def _kinds(made: object) -> list[tuple[str, object]]:
    if not isinstance(made, Recipe):
        return []
    order = {kind: i for i, kind in enumerate(KINDS)}
    named = [(place.split(".")[0], stage) for place, stage in made.stages()]
    return sorted(named, key=lambda pair: order[pair[0]])


def split_docstring(text: str) -> tuple[str, str, str]:
    """(summary, formula and explanation; departures; reference) of a recipe's docstring."""
    body, _, tail = text.partition("\nDepartures:")
    departures, _, reference = tail.partition("\nReference:")
    if not reference:
        body, _, reference = text.partition("\nReference:")
    return body.strip(), one_line(departures), one_line(reference).rstrip(".")


def linked(reference: str) -> str:
    """The reference with arXiv numbers as links."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", reference)


def cell(text: str) -> str:
    """The text with bars escaped, which would end the cell of a table."""
    return text.replace("|", "\\|")


def one_line(text: str) -> str:
    """The text in one line, its first letter large unless it belongs to a name or a formula."""
    line = re.sub(r"\s+", " ", text).strip()
    return line if re.match(r"arXiv|verl|[^a-z]", line) else line[:1].upper() + line[1:]


__all__ = ["cell", "gallery", "one_line", "page", "stale_pictures", "write_picture"]
