"""Tables and figures of speed, from the files that the benchmarks write; build_docs.py uses it.

    measured, one command each (benchmarks/README.md)   docs/speed/*.json, docs/isopo/results/*.json
    pages                                               docs/speed.md, docs/isopo/overhead.md,
                                                        docs/isopo/growth.md, docs/control.md

A page is written by hand but for its blocks, `<!-- NAME: written from JSON -->` to `<!-- end -->`.
A figure carries the digest of its file, so that `build_docs.py --check` sees one that is out of
date. A goal whose file is missing is not measured.
"""

import hashlib
import json
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/speed.md", "docs/isopo/overhead.md", "docs/isopo/growth.md", "docs/control.md")
ENGINES = ROOT / "docs/results/engines"
SPEED, ISOPO = ROOT / "docs/speed", ROOT / "docs/isopo/results"
BLOCK = re.compile(r"(<!-- ([\w-]+): written from JSON -->\n).*?(<!-- end -->)", re.S)
PAPER = "the paper's loop, 250"
AXES = ("tokens", "sequences", "overlap", "layers", "hidden")


def load(path: Path) -> Any:
    """The contents of a file; None where it is missing."""
    return json.loads(path.read_text()) if path.exists() else None


# --- goals


class Goal(NamedTuple):
    """A goal and the number that meets it or not; None where nothing was measured."""

    what: str
    bound: str
    value: float | None
    shown: str = "{:.2f}"
    unit: str = ""
    remark: str = ""

    @property
    def limit(self) -> float:
        return float(self.bound[1:].replace(",", ""))

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.limit if self.bound[0] == "≤" else self.value >= self.limit

    @property
    def row(self) -> str:
        measured, met = "not measured", ""
        if self.value is not None:
            measured = self.shown.format(self.value) + self.unit
            measured += f" ({self.remark})" if self.remark else ""
            met = "yes" if self.met else "no"
        bound = f"{self.bound[0]} {self.bound[1:]}{self.unit}"
        return f"| {self.what} | {bound} | {measured} | {met} |"


def goals() -> list[Goal]:
    return [*step_goals(), *overhead_goals(), *rollout_goals(), *update_goals(), *loss_goals()]


def step_goals() -> list[Goal]:
    arms = steps()
    base = arms.get(("arithmetic", "reinforce"))
    whole = arms.get(("arithmetic", "reinforce whole"))
    isopo, ntk = (arms.get(("arithmetic", arm)) for arm in ("isopo", "isopo-ntk"))
    grpo, vllm = (arms.get(("gsm8k", arm)) for arm in ("grpo", "trl-vllm"))

    def over(arm: Any, other: Any, key: str) -> float | None:
        return arm[key] / other[key] if arm and other else None

    def of(arm: Any, key: str) -> float | None:
        return arm[key] if arm else None

    short = "SmolLM2-135M, 64 x 8 responses of at most 12 tokens, two updates"
    long = "SmolLM2-135M, GSM8K, 16 x 8 responses of at most 256 tokens"
    beside = f"{vllm['step']:.2f} s" if vllm else ""
    return [
        Goal(f"{short}: update, REINFORCE", "≤0.20", of(base, "update"), "{:.3f}", " s"),
        Goal("ISOPO's update over whole-sequence REINFORCE's", "≤1.10",
             over(isopo, whole, "update"), unit="x"),
        Goal("ISOPO-NTK's update over whole-sequence REINFORCE's", "≤1.30",
             over(ntk, whole, "update"), unit="x"),
        Goal(f"{long}: whole step, GRPO", "≤0.75", of(grpo, "step"), "{:.3f}", " s"),
        Goal("TRL + vLLM's step over proxpo's", "≥3.5", over(vllm, grpo, "step"), unit="x",
             remark=beside),
        Goal("peak memory of that step", "≤15", of(grpo, "peak_gib"), "{:.1f}", " GiB"),
    ]  # fmt: skip


def overhead_goals() -> list[Goal]:
    eager, graphs = (ratios(name) for name in ("overhead-eager", "overhead-graphs"))
    shape = "Qwen3-0.6B shape, forward and backward over REINFORCE's"

    def worst(
        table: dict[tuple[str, str], float], wanted: Callable[[str], bool], wide: bool | None = None
    ) -> tuple[float | None, str]:
        """The largest ratio of some methods, and its case; wide: of the wide model, or the rest."""
        chosen = {
            (case, method): ratio
            for (case, method), ratio in table.items()
            if "135M" not in case and wanted(method) and (wide is None or ("wide" in case) == wide)
        }
        if not chosen:
            return None, ""
        key = max(chosen, key=chosen.__getitem__)
        return chosen[key], f"{key[1]}, {key[0]}"

    def plain(method: str) -> bool:
        return method == "isopo, 64 samples"

    def other(method: str) -> bool:
        return method.startswith(("isopo euclidean", "isopo r", "isopo reg"))

    def ntk(method: str) -> bool:
        return method == "isopo-ntk"

    rows = [
        (f"{shape}: ISOPO, launched from Python, worst shape", "≤1.15", worst(eager, plain, False)),
        ("the same, wide model", "≤1.04", worst(eager, plain, True)),
        ("the same as CUDA graphs, worst shape", "≤1.05", worst(graphs, plain)),
        ("ISOPO with q, r or reg, launched, worst", "≤1.15", worst(eager, other)),
        ("ISOPO with q, r or reg, CUDA graphs, worst", "≤1.05", worst(graphs, other)),
        ("ISOPO-NTK, launched, worst shape", "≤1.30", worst(eager, ntk)),
        ("ISOPO-NTK, CUDA graphs, worst shape", "≤1.30", worst(graphs, ntk)),
    ]
    return [
        Goal(what, bound, value, "{:.3f}", "x", remark) for what, bound, (value, remark) in rows
    ]


def rollout_goals() -> list[Goal]:
    small, large = (load(SPEED / f"rollouts-{rows}.json") or {} for rows in (128, 512))
    what = "rollouts, Qwen3-0.6B shape"
    rates = [data.get("rates", {}) for data in (small, large)]
    vllm = [f"vLLM {r['vllm']:,.0f}" if "vllm" in r else "" for r in rates]
    return [
        Goal(f"{what}, 128 x 256", "≥40,000", rates[0].get("local"), "{:,.0f}", " tok/s", vllm[0]),
        Goal(f"{what}, 512 x 256", "≥60,000", rates[1].get("local"), "{:,.0f}", " tok/s", vllm[1]),
        Goal("512 x 256: first token after", "≤20", large.get("first_token"), "{:.1f}", " s"),
    ]


def update_goals() -> list[Goal]:
    """The trainer's fastest REINFORCE update."""
    entries = (load(SPEED / "update-peak.json") or {}).get("entries", {})
    prefix = "qwen3-0.6b 8x1024/reinforce"
    percents = {n: e["percent"] for n, e in entries.items() if n.startswith(prefix)}
    best = max(percents, key=percents.__getitem__, default=None)
    remark = f"{entries[best]['ms']:.0f} ms, {best.partition('/')[2]}" if best else ""
    what = "update, Qwen3-0.6B shape, 8 x 1024, REINFORCE, of the card's bf16 peak"
    return [Goal(what, "≥35", percents.get(best), "{:.1f}", " %", remark)]


def loss_goals() -> list[Goal]:
    rows = []
    for device, bound in (("gpu", "≤4"), ("cpu", "≤6")):
        entries = (load(SPEED / f"loss-cost-{device}.json") or {}).get("entries", {})
        relative = {slug: entry["relative"] for slug, entry in entries.items()}
        worst = max(relative, key=relative.__getitem__, default="")
        what = f"losses over REINFORCE's, {device.upper()}, worst"
        rows.append(Goal(what, bound, relative.get(worst), "{:.1f}", "x", worst))
    return rows


# --- measured


def steps() -> dict[tuple[str, str], dict[str, float]]:
    """Medians of each case and arm of benchmarks/gpu_step.py over all its counted steps."""
    runs: dict[tuple[str, str], list[dict]] = {}
    for name, entry in (load(SPEED / "gpu-step.json") or {}).get("entries", {}).items():
        case, arm, _ = name.split("/")
        if entry["steps"]:
            runs.setdefault((case, arm), []).append(entry)
    return {key: _medians(entries) for key, entries in runs.items()}


def _medians(entries: list[dict]) -> dict[str, float]:
    rows = [row for entry in entries for row in entry["steps"]]
    keys = ("step", "rollout", "update")
    medians = {key: statistics.median(row[key] for row in rows) for key in keys}
    peak = max(entry.get("peak_gib", 0.0) for entry in entries)
    return {**medians, "peak_gib": peak, "count": len(rows)}


def ratios(name: str) -> dict[tuple[str, str], float]:
    """Time over REINFORCE's by case and method, of benchmarks/isopo_overhead.py."""
    rows = load(ISOPO / f"{name}.json") or []
    return {(r["case"].removesuffix(", graph"), r["method"]): r["time"] for r in rows}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = [tuple(head), *map(tuple, rows)]
    cells.insert(1, ("---",) * len(cells[0]))
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def goal_block() -> str:
    rows = "".join(f"{goal.row}\n" for goal in goals())
    return f"| what | goal | measured | met |\n| --- | --- | --- | --- |\n{rows}"


def step_block() -> str:
    arms = steps()
    if not arms:
        return "Not measured yet.\n"
    rows = [
        (case, arm, *(f"{m[key]:.3f} s" for key in ("step", "rollout", "update")),
         f"{m['peak_gib']:.1f} GiB", str(m["count"]))
        for (case, arm), m in arms.items()
    ]  # fmt: skip
    head = ("case", "arm", "step", "rollout", "update", "peak", "steps counted")
    return f"{table(head, rows)}\n![Seconds of a step](speed/steps.svg)\n"


def update_block() -> str:
    entries = (load(SPEED / "update-peak.json") or {}).get("entries", {})
    if not entries:
        return "Not measured yet.\n"
    kinds = [e["profile"]["kinds_ms"] for e in entries.values() if "profile" in e]
    names = sorted({kind for each in kinds for kind in each})
    rows = []
    for name, e in entries.items():
        trace = e.get("profile", {"kinds_ms": {}, "gaps_ms": 0.0})
        parts = [f"{trace['kinds_ms'].get(kind, 0.0):.1f}" for kind in names]
        rows.append((name, f"{e['ms']:.1f}", f"{e['percent']:.1f} %", *parts,
                     f"{trace['gaps_ms']:.1f}"))  # fmt: skip
    return table(("update", "ms", "of the peak", *names, "gaps"), rows)


def rollout_block() -> str:
    """Tokens per second of every sampler, and the milliseconds of a decoding step by part."""
    rows = []
    for count in (128, 512):
        data = load(SPEED / f"rollouts-{count}.json") or {"rates": {}}
        rows += [(f"{count} x 256", name, f"{rate:,.0f}") for name, rate in data["rates"].items()]
        parts = ", ".join(f"{part} {ms:.2f}" for part, ms in data.get("profile_ms", {}).items())
        rows += [(f"{count} x 256", "a decoding step, ms", parts)] if parts else []
    return (
        table(("rows x tokens", "", "tokens per second"), rows) if rows else "Not measured yet.\n"
    )


def overhead_block(name: str) -> str:
    """Ratios by case and method; with peak memory, where it was measured, of two of them."""
    cells = ratios(name)
    cases, methods = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    methods = [m for m in methods if m != "reinforce"]
    memory = {(r["case"], r["method"]): r["memory"] for r in load(ISOPO / f"{name}.json") or []}
    held = [m for m in ("isopo, 64 samples", PAPER) if memory.get((cases[0], m))] if cases else []
    rows = [
        (
            case,
            *(f"{cells[case, m]:.3f}x" if (case, m) in cells else "" for m in methods),
            *(f"{memory[case, m]:.2f}x" for m in held),
        )
        for case in cases
    ]
    return table(("case", *methods, *(f"memory, {m}" for m in held)), rows)


def loss_block() -> str:
    rows = []
    for device in ("gpu", "cpu"):
        entries = (load(SPEED / f"loss-cost-{device}.json") or {}).get("entries", {})
        slowest = sorted(entries.items(), key=lambda pair: -pair[1]["relative"])[:8]
        rows += [
            (device.upper(), slug, f"{e['relative']:.2f}x", f"{1e3 * e['seconds']:.2f} ms",
             str(e["operations"]), str(e["waits"]))
            for slug, e in slowest
        ]  # fmt: skip
    head = ("device", "slowest losses", "over REINFORCE's", "time", "operations", "waits")
    return table(head, rows) if rows else "Not measured yet.\n"


def growth_block(device: str) -> str:
    data = load(ISOPO / f"growth-{device}.json")
    if data is None:
        return "Not measured yet.\n"
    rows = []
    for name, e in data["entries"].items():
        time, law, peak = e["ms"], e["law"], e["peak_gib"]
        rows.append((
            name, f"{time['reinforce']:.1f} ms", f"{time['isopo']:.1f} ms",
            f"{time['isopo'] / time['reinforce']:.3f}x", f"{law['isopo'] / law['reinforce']:.3f}x",
            f"{1024 * peak['reinforce']:.0f} MiB", f"{peak['isopo'] / peak['reinforce']:.3f}x",
        ))  # fmt: skip
    head = ("size", "REINFORCE", "ISOPO", "ratio", "law", "memory, REINFORCE", "memory, ratio")
    base = ", ".join(f"{key} {value:,}" for key, value in data["base"].items())
    where = f"{data['machine']['device']}, torch {data['machine']['torch']}"
    link = f"![Growth on a {device.upper()}](growth-{device}.svg)"
    return (
        f"{where}. The sizes that an axis does not change: {base}.\n\n{link}\n\n{table(head, rows)}"
    )


def control_block() -> str:
    entries = (load(SPEED / "control-ppo.json") or {}).get("entries", {})
    if not entries:
        return "Not measured yet.\n"
    rows = []
    for task, e in entries.items():
        ratios = [a / b for a, b in zip(*e["seconds"].values(), strict=True)]
        for name, scores in e["returns"].items():
            own = f" ({statistics.median(ratios):.2f}x)" if name == "proxpo" else ""
            rows.append((
                task, name, f"{statistics.mean(scores):.1f}",
                f"{min(scores):.1f} to {max(scores):.1f}",
                f"{statistics.median(e['seconds'][name]):.1f}{own}",
            ))  # fmt: skip
    return table(("task", "PPO of", "mean return", "seeds", "seconds"), rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "control": control_block,
    "goals": goal_block,
    "steps": step_block,
    "rollouts": rollout_block,
    "update": update_block,
    "losses": loss_block,
    "overhead-graphs": lambda: overhead_block("overhead-graphs"),
    "overhead-eager": lambda: overhead_block("overhead-eager"),
    "growth-cpu": lambda: growth_block("cpu"),
    "growth-gpu": lambda: growth_block("gpu"),
}


def pages() -> dict[Path, str]:
    """The pages with their blocks written anew."""
    return filled_pages(PAGES, BLOCKS)


def filled_pages(names: Iterable[str], blocks: dict[str, Callable[[], str]]) -> dict[Path, str]:
    """Pages with these blocks written anew."""

    def filled(match: re.Match[str]) -> str:
        return f"{match[1]}{blocks[match[2]]()}{match[3]}"

    return {ROOT / p: BLOCK.sub(filled, (ROOT / p).read_text()) for p in names}


# --- figures


def figures() -> dict[Path, Path]:
    """The measured file of every figure that has one."""
    drawn = {ISOPO.parent / f"growth-{d}.svg": ISOPO / f"growth-{d}.json" for d in ("cpu", "gpu")}
    drawn[SPEED / "steps.svg"] = SPEED / "gpu-step.json"
    drawn[ENGINES / "trl-vllm.svg"] = ENGINES / "trl-vllm.json"
    return {figure: data for figure, data in drawn.items() if data.exists()}


def stale_figures(drawn: dict[Path, Path] | None = None) -> list[Path]:
    """Figures that were drawn from another file than the present one."""
    return [
        figure
        for figure, data in (figures() if drawn is None else drawn).items()
        if not figure.exists() or digest(data) not in figure.read_text()[:2000]
    ]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def draw_growth(data: dict[str, Any], canvas: Any) -> None:
    """Time, ratio and memory in three rows, one column an axis; the cost law dashed."""
    from proxpo.runs.page import PALETTE, SOFT

    colours = {"reinforce": SOFT, "isopo": PALETTE[0][0]}
    points_of: dict[str, dict[int, Any]] = {axis: {} for axis in AXES}
    for name, entry in data["entries"].items():
        axis, _, size = name.partition("=")
        points_of[axis][int(size)] = entry
    measured = {axis: points for axis, points in points_of.items() if points}
    axes = canvas.subplots(3, len(measured), sharex="col", sharey="row", squeeze=False)
    for column, (axis, points) in zip(axes.T, measured.items()):
        x, entries = list(points), list(points.values())
        middle = entries[len(entries) // 2]
        rate = middle["law"]["reinforce"] / middle["ms"]["reinforce"]
        for method, colour in colours.items():
            style: Any = {"color": colour, "marker": "o", "markersize": 3, "linewidth": 1.4}
            law: Any = {"color": colour, "linestyle": "--", "linewidth": 1}
            column[0].plot(x, [e["ms"][method] for e in entries], label=method, **style)
            column[0].plot(
                x, [e["law"][method] / rate for e in entries], label=f"{method}, law", **law
            )
            column[2].plot(x, [1024 * e["peak_gib"][method] for e in entries], **style)
        for key, kind in (("ms", style), ("law", law)):
            column[1].plot(x, [e[key]["isopo"] / e[key]["reinforce"] for e in entries], **kind)
        column[2].set_xlabel(axis)
        column[2].set_xscale("log", base=2)
        column[2].set_xticks(x, [f"{value:,}" for value in x], fontsize=7)
        for panel in (column[0], column[2]):
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter("{x:,g}")
            panel.minorticks_off()
    for row, title in zip(axes, ("milliseconds", "ISOPO / REINFORCE", "peak, MiB")):
        row[0].set_ylabel(title)
    axes[0][0].legend(frameon=False, fontsize=7)


def draw_steps(_: dict[str, Any], canvas: Any) -> None:
    """Bars of a step's rollout and update, one panel a case."""
    from proxpo.runs.page import PALETTE

    arms = steps()
    cases = list(dict.fromkeys(case for case, _ in arms))
    for axis, case in zip(canvas.subplots(1, len(cases), squeeze=False)[0], cases):
        mine = {arm: m for (c, arm), m in arms.items() if c == case}
        names, left = list(mine)[::-1], [0.0] * len(mine)
        for key, (colour, _) in zip(("rollout", "update"), PALETTE):
            widths = [mine[name][key] for name in names]
            axis.barh(names, widths, left=left, color=colour, label=key)
            left = [a + b for a, b in zip(left, widths)]
        axis.set_title(case)
        axis.set_xlabel("seconds")
        axis.legend(frameon=False)


def draw_rewards(data: dict[str, Any], canvas: Any) -> None:
    """Rewards over the steps of each method, a panel for each variant of the sums."""
    from proxpo.runs.page import PALETTE

    panels: dict[str, dict[str, list[float]]] = {}
    for name, entry in data["entries"].items():
        task, method, variant = name.split("/")
        if task == "arithmetic-chat":  # on the other task nothing is learnt
            rewards = [step["reward"] for step in entry["steps"]]
            panels.setdefault(variant, {})[method.split()[0]] = rewards
    known = dict.fromkeys(method for curves in panels.values() for method in curves)
    colours = {method: colour for method, (colour, _) in zip(known, PALETTE)}
    lines = {}
    axes = canvas.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (title, curves) in zip(axes, panels.items()):
        for method, rewards in curves.items():
            steps = range(1, len(rewards) + 1)
            (lines[method],) = axis.plot(steps, rewards, color=colours[method], linewidth=1.4)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("reward")
    canvas.legend(lines.values(), lines, frameon=False, loc="outside right center")


DRAWINGS = {"growth": draw_growth, "steps": draw_steps, "trl-vllm": draw_rewards}


def draw(figure: Path, data: Path) -> None:
    size = (11.0, 6.0) if figure.name.startswith("growth") else (10.0, 3.2)
    drawing = DRAWINGS[figure.stem.removesuffix("-cpu").removesuffix("-gpu")]
    save_drawing(figure, data, drawing, size)


def save_drawing(
    figure: Path, data: Path, drawing: Callable[[Any, Any], None], size: tuple[float, float]
) -> None:
    """Draws a file's contents as SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    from proxpo.report.figure_images import GRID, LOOK

    with rc_context(LOOK):
        canvas = Canvas(figsize=size, layout="constrained")
        drawing(load(data), canvas)
        for axis in canvas.axes:
            axis.grid(color=GRID, linewidth=0.7)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        figure.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(figure, metadata={"Date": None, "Description": digest(data)})


__all__ = ["draw", "figures", "pages", "stale_figures"]
