"""Tables and figures of the evidence, from files under docs/results; build_docs.py uses it.

    docs/results/why/profiles.json   scripts/task_profile.py    starts: accuracy, lengths, F and N
    docs/results/why/isopo.json      scripts/isopo_why.py       directions of ISOPO's updates
    docs/results/why/ratios.json     scripts/ratio_why.py       ratios of stale and hot data
    docs/results/claims.yaml         by hand                    claims of papers, and what was seen
    docs/results/STUDY/summary.json  proxpo report              README's front figure

A file holds a list of entries, or several such lists by name: results are added by dropping entries
in. The pages are docs/results/why.md, claims.md beside it and README.md, their blocks as in
speed_pages.py.
"""

import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from markdown.extensions.toc import slugify
from speed_pages import ROOT, filled_pages, load, save_drawing, table
from speed_pages import stale_figures as stale_among

RESULTS = ROOT / "docs/results"
WHY = RESULTS / "why"
FRONT, FRONT_FILE, FRONT_AGAIN = "sizes", "box/summary.json", "again/summary.json"
FRONT_SIZE = (
    "the included model of 0.25 M parameters, four updates a rollout, each method at its best "
    "learning rate"
)
PAGES = ("docs/results/why.md", "docs/results/claims.md", "README.md")
VERDICTS = ("held", "held in part", "did not hold", "not tested")
OPTIMIZERS = ("adamw clipped", "adamw unclipped", "muon clipped", "muon unclipped")
RATIOS = {
    "token": "the token's own",
    "gspo": "mean of the response (GSPO)",
    "kpo": "KPO's filter",
    "ema-kpo": "EMA-KPO's filter",
}


def entries(path: Path) -> list[dict[str, Any]]:
    """The entries of a file of measurements, none where it is missing."""
    data = load(path) or []
    return [x for part in data.values() for x in part] if isinstance(data, dict) else data


def named(entry: dict[str, Any]) -> str:
    """Task and model of an entry."""
    return f"{entry['task'].split(':/')[0]}, {Path(entry['model']).name}"


def percent(x: float) -> str:
    return f"{100 * x:.1f} %"


# --- starts


def profile_block() -> str:
    rows = []
    for e in entries(WHY / "profiles.json"):
        sampled = next((v for k, v in e.items() if k.startswith("avg@")), e["sampled"])
        tokens = " / ".join(f"{e['tokens'][k]:.0f}" for k in ("p10", "median", "p90"))
        lengths = [_spread(e.get("gradients", {}).get(x)) for x in "FN"]
        accuracy = f"{percent(e['accuracy'])} / {percent(sampled)}"
        mixed, weighed = f"{100 * e['mixed_groups']:.0f} %", str(e.get("watched", ""))
        rows.append((named(e), accuracy, mixed, tokens, weighed, *lengths))
    head = ("task, model", "greedy / sampled", "mixed groups", "tokens p10 / p50 / p90")
    more = ("responses weighed", "spread of F", "spread of N")
    return table((*head, *more), rows) if rows else "Not measured yet.\n"


def _spread(length: dict[str, float] | None) -> str:
    if length is None:
        return ""
    return f"{length['spread']:.2f} ({length['tokens']:+.2f}, {length['reward']:+.2f})"


# --- directions


def direction_block() -> str:
    parts = []
    for e in entries(WHY / "isopo.json"):
        npg = any("npg" in arm for arm in e["arms"].values())
        whole, by_layer = ("gradient", "isopo"), ("gradient by layer", "isopo by layer")
        keys = [k for k in (*whole, *by_layer) if k in e["arms"]["reinforce"]]
        names = ("REINFORCE", "isopo p=-1", "by layer: REINFORCE", "by layer: isopo p=-1")
        head = ["arm", *names[: len(keys)], *OPTIMIZERS]
        head += ["natural gradient, damping 0.01 / 0.1 / 1"] if npg else []
        rows = []
        for name, arm in e["arms"].items():
            cells = [f"{arm[k]:.2f}" for k in (*keys, *OPTIMIZERS)]
            cells += [" / ".join(f"{x:.2f}" for x in arm["npg"].values())] if npg else []
            rows.append((name, *cells))
        parts.append(f"{named(e)}:\n\n{table(head, rows)}")
    return "\n".join(parts) if parts else "Not measured yet.\n"


def weight_block() -> str:
    """Spread of the lengths by kind of layer, and the part of the prompt's positions in them."""
    parts, columns = [], ("F", "N", "prompt")
    for e in entries(WHY / "isopo.json"):
        prompt = e.get("prompt", {})
        kinds: dict[str, list[dict[str, float]]] = {}
        for name, spread in e["weights"]["layers"].items():
            measured = spread | ({"prompt": prompt[name]} if name in prompt else {})
            kinds.setdefault(_kind(name), []).append(measured)
        rows = [
            (kind, str(len(some)), *(_range(x[k] for x in some if k in x) for k in columns))
            for kind, some in kinds.items()
        ]
        head = ("layers", "number", "spread of F", "spread of N", "prompt / response")
        parts.append(f"{named(e)}:\n\n{table(head, rows)}")
    return "\n".join(parts) if parts else "Not measured yet.\n"


def _kind(layer: str) -> str:
    """The kind of a layer by its name: the last module's."""
    words = [w for w in layer.split(".") if not w.isdigit() and w not in ("weight", "bias")]
    if "embed" in layer:
        return "head (tied)" if words[-1] == "head" else "embedding"
    return "norms" if "norm" in words[-1] else words[-1]


def _range(values: Iterable[float]) -> str:
    some = sorted(values)
    return " to ".join(f"{x:.2f}" for x in dict.fromkeys([*some[:1], *some[-1:]]))


# --- ratios


def stale_block() -> str:
    """P3O beside the clips: one row for each rollout and policy."""
    parts = []
    for e in entries(WHY / "ratios.json"):
        methods = ("grpo", "cispo", "p3o", "gspo")
        rows = []
        for c in e["cells"]:
            m = c["methods"]
            cells = [
                f"{m[x]['clipped']:.2f} / {m[x]['kept']:.2f} / {m[x]['unclipped']:.2f}"
                for x in methods
            ]
            fresh = f"{m['p3o']['fresh']:.2f} / {m['unclipped, token_mean']['fresh']:.2f}"
            again = f"{c['again']['token_mean']:.2f}"
            where = (
                f"{c['temperature']:g}",
                str(c["updates"]),
                f"{c['ess']:.3f}",
                f"{c['kl']:.2g}",
            )
            rows.append((*where, *cells, fresh, again))
        head = ("temperature", "updates", "ESS", "KL a token", *methods)
        head = (*head, "fresh: P3O / unclipped", "two fresh")
        parts.append(f"{named(e)}, updates at {e['lr']:g}:\n\n{table(head, rows)}")
    return "\n".join(parts) if parts else "Not measured yet.\n"


def length_block() -> str:
    """Log-ratios of the most stale policy by response length, at temperature 1."""
    parts = []
    for e in entries(WHY / "ratios.json"):
        c = _most_stale(e)
        rows = []
        for third in c["lengths"]:
            tokens = " to ".join(map(str, third["tokens"]))
            for key, name in RATIOS.items():
                x = third[key]
                numbers = [f"{x[k]:+.2g}" if k != "std" else f"{x[k]:.2g}" for k in ("mean", "std")]
                apart = f"{x['bias']:+.2g}", f"{x['rms']:.2g}"
                rows.append((tokens, name, *numbers, *apart, percent(x["outside"])))
        head = ("tokens", "log-ratio", "mean", "spread", "bias", "distance", "outside the clip")
        fit, gains = c["fitted"], e["gains"]
        asked = (
            f"asks for V = {fit['v']:.2g}, Q = {fit['q']:.2g}, gain {fit['gain']:.2g}"
            if fit
            else ""
        )
        used = "; ".join(
            f"{name}: " + ", ".join(f"{g:.2g} at {t}" for t, g in list(schedule.items())[::2])
            for name, schedule in gains.items()
        )
        parts.append(
            f"{named(e)}, {c['updates']} updates at {e['lr']:g}:\n\n{table(head, rows)}\n"
            f"The data {asked}. Gains in use: {used}.\n"
        )
    return "\n".join(parts) if parts else "Not measured yet.\n"


def _most_stale(entry: dict[str, Any]) -> dict[str, Any]:
    cells = [c for c in entry["cells"] if c["temperature"] == 1]
    return max(cells, key=lambda c: c["updates"])


# --- claims


@cache
def claims() -> list[dict[str, Any]]:
    return yaml.safe_load((RESULTS / "claims.yaml").read_text())


def tally_block() -> str:
    """Number of measurements of each verdict, by paper."""
    rows = []
    for paper in claims():
        seen = [x["verdict"] for claim in paper["claims"] for x in claim["seen"]]
        rows.append((paper["source"], *(str(seen.count(verdict)) for verdict in VERDICTS)))
    return table(("paper", *VERDICTS), rows)


def claim_summary_block() -> str:
    """One row for each claim: the number of its verdicts, and what was seen in short."""
    rows = []
    for paper in claims():
        for claim in paper["claims"]:
            seen = [x["verdict"] for x in claim["seen"]]
            counts = [f"{seen.count(v)} {v}" for v in VERDICTS if v in seen]
            link = f"[{claim['name']}](#{slugify(claim['name'], '-')})"
            source = paper["source"].split(",")[0]
            rows.append((f"{source}: {link}", ", ".join(counts), claim["short"].strip()))
    return table(("claim", "settings", "in short"), rows)


def claim_block() -> str:
    """A section for each paper; for each claim its text and a table of what was seen."""
    parts = []
    for paper in claims():
        parts.append(f"\n## {paper['source']}\n")
        for claim in paper["claims"]:
            rows = [
                (
                    f"**{seen['verdict']}**",
                    seen["size"],
                    f"{seen['what']} ([numbers]({seen['result']}))",
                )
                for seen in claim["seen"]
            ]
            parts.append(f"\n### {claim['name']}\n\nThe claim: {claim['claim']}.\n\n")
            parts.append(table(("verdict", "setting", "what was seen"), rows))
    return "".join(parts)


# --- front


def front_block() -> str:
    data, again = (load(RESULTS / FRONT / file) for file in (FRONT_FILE, FRONT_AGAIN))
    names = ", ".join(a["arm"] for a in data["arms"])
    alt = f"Final score and KL to the start of {names}, with 95 % intervals"
    text = f"""*Score ({data["score"]}) and KL to the start after {data["end_step"]:g} steps,
        means and 95 % intervals over {_seeds(data)} seeds ({FRONT_SIZE}). {len(again["arms"])} of
        them were run again on {_seeds(again)} other seeds: {_first_beats(again)}, all after
        correction for the number of pairs ([measurement](docs/results/{FRONT}); [the
        names](docs/results/README.md)). When a method can help: [why](docs/results/why.md);
        for your setting: [choose](docs/choose.md).*"""
    filled = textwrap.fill(" ".join(text.split()), 120, break_long_words=False)
    return f"![{alt}](docs/results/front.svg)\n\n{filled}\n"


def _seeds(data: dict[str, Any]) -> int:
    return max(arm["finished"] for arm in data["arms"])


def _first_beats(data: dict[str, Any]) -> str:
    """What the arm with the highest score beats after correction, and by how much."""
    first = max(data["arms"], key=lambda arm: arm["final"]["mean"])["arm"]
    held = [
        (abs(pair["student"]["mean"]), pair["b"] if pair["a"] == first else pair["a"])
        for pair in data["pairs"]
        if pair["measure"] == "final" and pair["winner"] == first and pair["p_holm"] < 0.05
    ]
    *some, last = (f"{arm} by {100 * by:.1f}" for by, arm in sorted(held, reverse=True))
    return f"{first} beats {', '.join(some)} and {last} points"


BLOCKS: dict[str, Callable[[], str]] = {
    "profiles": profile_block,
    "directions": direction_block,
    "weights": weight_block,
    "stale": stale_block,
    "lengths": length_block,
    "tally": tally_block,
    "claims-in-short": claim_summary_block,
    "claims": claim_block,
    "front": front_block,
}


def pages() -> dict[Path, str]:
    """The pages with their blocks written anew."""
    return filled_pages(PAGES, BLOCKS)


# --- figures


def figures() -> dict[Path, Path]:
    """The measured file of every figure that has one."""
    drawn = {
        RESULTS / "front.svg": RESULTS / FRONT / FRONT_FILE,
        WHY / "directions.svg": WHY / "isopo.json",
        WHY / "stale.svg": WHY / "ratios.json",
        WHY / "lengths.svg": WHY / "ratios.json",
    }
    return {figure: data for figure, data in drawn.items() if data.exists()}


def stale_figures() -> list[Path]:
    """Figures that were drawn from another file than the present one."""
    return stale_among(figures())


def draw(figure: Path, data: Path) -> None:
    sizes = {
        "front": lambda: (9.0, 0.6 + 0.36 * len(load(data)["arms"])),
        "directions": lambda: (max(9.0, 4.8 * len(entries(data))), 3.2),
        "stale": lambda: (9.0, 5.0),
        "lengths": lambda: (9.0, 3.0),
    }
    save_drawing(figure, data, DRAWINGS[figure.stem], sizes[figure.stem]())


def draw_front(data: dict[str, Any], canvas: Any) -> None:
    """Final score and drift of every arm: mean and 95 % interval."""
    from proxpo.runs.page import PALETTE

    arms = data["arms"][::-1]
    panels = canvas.subplots(1, 2, sharey=True)
    for axis, key, title, unit in (
        (panels[0], "final", data["score"], 100.0),
        (panels[1], "kl", "KL to the start, nats a response", 1.0),
    ):
        for place, arm in enumerate(arms):
            low, high = (unit * x for x in arm[key]["student"])
            colour = PALETTE[(len(arms) - 1 - place) % len(PALETTE)][0]
            axis.plot([low, high], [place, place], color=colour, linewidth=2.4)
            axis.plot([unit * arm[key]["mean"]], [place], "o", color=colour, markersize=6)
        axis.set_xlabel(f"{title}, %" if unit > 1 else title)
    panels[0].set_yticks(range(len(arms)), [arm["arm"] for arm in arms])
    panels[0].set_ylim(-0.5, len(arms) - 0.5)


def draw_directions(data: Any, canvas: Any) -> None:
    """Cosines with REINFORCE's step: the gradient, after AdamW, after Muon; a panel an entry."""
    from proxpo.runs.page import PALETTE

    some = entries(WHY / "isopo.json")
    for axis, entry in zip(canvas.subplots(1, len(some), squeeze=False)[0], some):
        arms = [name for name in entry["arms"] if name != "reinforce"][::-1]
        for offset, (key, label) in enumerate(
            (("muon clipped", "Muon"), ("adamw clipped", "AdamW"), ("gradient", "SGD"))
        ):
            places = [place + 0.26 * (offset - 1) for place in range(len(arms))]
            values = [entry["arms"][name][key] for name in arms]
            axis.barh(places, values, height=0.24, color=PALETTE[2 - offset][0], label=label)
        axis.set_yticks(range(len(arms)), arms)
        axis.set_xlim(0, 1)
        axis.set_xlabel("cosine with REINFORCE's step")
        axis.set_title(named(entry))
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def draw_stale(data: Any, canvas: Any) -> None:
    """Size and direction kept, over updates at temperature 1 and over temperatures at none."""
    from proxpo.runs.page import PALETTE

    entry = entries(WHY / "ratios.json")[-1]
    methods = ("p3o", "grpo", "cispo", "gspo", "kpo", "ema-kpo")
    stale = [c for c in entry["cells"] if c["temperature"] == 1]
    hot = [c for c in entry["cells"] if c["updates"] == 0]
    axes = canvas.subplots(2, 2, sharex="col", sharey=True)
    for row, field in zip(axes, ("kept", "unclipped")):
        for axis, cells, key in zip(row, (stale, hot), ("updates", "temperature")):
            x = [c[key] for c in cells]
            for method, (colour, _) in zip(methods, PALETTE):
                y = [c["methods"][method][field] for c in cells]
                axis.plot(x, y, "o-", color=colour, label=method, linewidth=1.4, markersize=4)
            axis.plot(x, [c["ess"] for c in cells], "--", color="0.45", label="ESS")
            axis.set_xticks(x)
            axis.set_ylim(bottom=0)
    for axis, label in zip(axes[1], ("updates", "temperature")):
        axis.set_xlabel(label)
    axes[0][0].set_ylabel("size kept")
    axes[1][0].set_ylabel("cosine, unclipped")
    axes[0][0].set_title(f"stale data: {named(entry)}")
    axes[0][1].set_title("hot data, no update")
    axes[0][1].legend(frameon=False, fontsize=8, ncols=2)


def draw_lengths(data: Any, canvas: Any) -> None:
    """Spread of the log-ratios in use by length, and the gains of the filters by token."""
    from proxpo.runs.page import PALETTE

    entry = entries(WHY / "ratios.json")[-1]
    left, right = canvas.subplots(1, 2)
    thirds = _most_stale(entry)["lengths"]
    x = [sum(third["tokens"]) / 2 for third in thirds]
    for (key, name), (colour, _) in zip(RATIOS.items(), PALETTE):
        y = [max(third[key]["std"], 1e-7) for third in thirds]
        left.plot(x, y, "o-", color=colour, label=name, linewidth=1.4, markersize=4)
    left.axhline(4e-4, color="0.45", linestyle="--", linewidth=1, label="clip of GSPO and KPO")
    left.set_yscale("log")
    left.set_xlabel("tokens of a response")
    left.set_ylabel("spread of log-ratios")
    left.set_title(named(entry))
    left.legend(frameon=False, fontsize=7, loc="center left")
    for (name, schedule), (colour, _) in zip(entry["gains"].items(), PALETTE[2:]):
        tokens = [int(t) for t in schedule]
        right.plot(tokens, list(schedule.values()), "o-", color=colour, label=name, markersize=4)
    right.set_xscale("log")
    right.set_yscale("log")
    for axis in (left.yaxis, right.yaxis, right.xaxis):
        axis.set_major_formatter("{x:g}")
    right.set_xlabel("token")
    right.set_ylabel("gain")
    right.legend(frameon=False, fontsize=8)


DRAWINGS = {
    "front": draw_front,
    "directions": draw_directions,
    "stale": draw_stale,
    "lengths": draw_lengths,
}

__all__ = ["draw", "figures", "pages", "stale_figures"]
