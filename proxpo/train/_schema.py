# ruff: noqa: RUF009  (`setting` makes a dataclass field, it does not compute a default)
"""The settings of a run: nested frozen dataclasses, every field with its line of documentation."""

import functools
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from proxpo.errors import ProxpoError, nearest, resolve
from proxpo.stages._options import brief, coerce
from proxpo.types import KINDS, Recipe

Optimizer = Literal["adamw", "muon", "soap", "shampoo", "kfac"]
Schedule = Literal["constant", "linear", "cosine"]
Dtype = Literal["auto", "float32", "bfloat16", "float64"]
Resume = Literal["fixed", "next", "now"]


SINKS = ("tensorboard", "trackio", "wandb")
ROWS = 1 << 20  # responses of one rollout or one evaluation
TOKENS = 1 << 24
STEPS = 1_000_000_000
DAY = 86_400
LARGEST_REWARD = 1e15  # beyond it the squares of a batch leave float32
VALUES = 10_000  # in one block of options
TEXT = 4096  # characters, as of a path
LARGE = 1e30  # leaves room for products within float32


def setting(
    default: Any,
    doc: str,
    *,
    resume: Resume,
    low: int | float | None = None,
    high: int | float | None = None,
    above: int | float | None = None,
) -> Any:
    """A field with its documentation, its range, and the effect of a change on `--resume`.

    resume: "fixed": a change is refused, the setting is part of what the run is;
        "next": a change takes effect from the next step on, and is refused where no step is left;
        "now": a change takes effect at once, in the evaluation of a finished run too.
    """
    info = {"doc": doc, "resume": resume, "low": low, "high": high, "above": above}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=info)
    return field(default=default, metadata=info)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str = setting("tiny", "tiny, smollm2, a folder, or a Hugging Face id", resume="fixed")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N", resume="now")
    dtype: Dtype = setting(
        "auto", "of the arithmetic; auto: bfloat16 on a GPU, float32 on a CPU", resume="next"
    )
    gradient_checkpointing: bool = setting(
        False, "recompute activations to save memory", resume="next"
    )
    lora: dict | None = setting(
        None, "options of peft's LoraConfig; none trains every weight", resume="fixed"
    )


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    name: str = setting(
        "arithmetic",
        "arithmetic[:LEVEL], arithmetic-chat, calculator, gsm8k[:PATH], reasoning-gym:NAME, FILE",
        resume="fixed",
    )
    options: dict = setting({}, "options of the task, such as digits or held_out", resume="fixed")
    reward: str | None = setting(
        None, "FILE.py:FUNCTION instead of the task's own reward", resume="fixed"
    )
    reward_workers: int = setting(
        2, "processes that run reward functions", resume="now", low=1, high=1024
    )
    reward_timeout: float = setting(
        10.0,
        "seconds one sample's reward may take; a call for many has as many times that",
        resume="now",
        above=0,
        high=DAY,
    )
    reward_memory: float | None = setting(
        8.0,
        "GiB of memory a reward worker and its children may use (on Linux); none: no limit",
        resume="now",
        above=0,
        high=1 << 20,
    )
    problems: int | None = setting(
        None,
        "train on the first so many different problems; none: on all, but 8 steps' worth of a "
        "generated task where the method learns from revisits (knapsack-rl, palu, dcpo)",
        resume="fixed",
        low=1,
        high=1 << 40,
    )
    correct_above: float | None = setting(
        None,
        "a response is right where its reward is above this; none: where the reward function says "
        "so, as 'acc' or 'correct'",
        resume="fixed",
        low=-LARGEST_REWARD,
        high=LARGEST_REWARD,
    )
    reward_max_failed: float = setting(
        0.5,
        "share of a batch whose rewards may fail before the run stops",
        resume="now",
        low=0,
        high=1,
    )
    drop_long: bool = setting(
        False, "leave out prompts over max_prompt instead of refusing them", resume="fixed"
    )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    backend: Literal["local", "vllm"] = setting(
        "local", "what samples: local or vllm", resume="now"
    )
    options: dict = setting({}, "options of the backend", resume="now")
    prompts_per_step: int = setting(64, "prompts a step", resume="next", low=1, high=ROWS)
    samples_per_prompt: int = setting(
        8, "responses to each prompt", resume="next", low=1, high=ROWS
    )
    max_prompt: int = setting(512, "longest prompt, in tokens", resume="fixed", low=1, high=TOKENS)
    max_tokens: int = setting(
        8, "longest response, or turn of one, in tokens", resume="fixed", low=1, high=TOKENS
    )
    temperature: float = setting(1.0, "sampling temperature", resume="fixed", above=0, high=1000)
    top_p: float = setting(
        1.0, "nucleus of the sampling distribution", resume="next", above=0, high=1
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int = setting(
        100, "rollouts, each followed by its updates", resume="next", low=1, high=STEPS
    )
    updates_per_rollout: int | None = setting(
        None,
        "optimizer steps on each rollout; none: one pass, that is mini_batches",
        resume="next",
        low=1,
        high=ROWS,
    )
    mini_batches: int = setting(
        1, "parts a rollout is cut into, one optimizer step each", resume="next", low=1, high=ROWS
    )
    micro_batch: int | None = setting(
        None, "sequences in one backward pass; none: all", resume="now", low=1, high=ROWS
    )
    optimizer: Optimizer = setting("adamw", "adamw, muon, soap, shampoo or kfac", resume="fixed")
    optimizer_options: dict = setting(
        {}, "further options of the optimizer, such as betas", resume="fixed"
    )
    lr: float = setting(3e-5, "learning rate", resume="next", low=0, high=LARGE)
    weight_decay: float = setting(0.01, "decoupled weight decay", resume="next", low=0, high=LARGE)
    grad_clip: float | None = setting(
        1.0, "largest norm of the gradient; none: no limit", resume="next", above=0, high=LARGE
    )
    lr_schedule: Schedule = setting(
        "constant", "constant, linear or cosine, over `steps`", resume="next"
    )
    warmup_steps: int = setting(
        0, "steps over which the rate rises from 0", resume="next", low=0, high=STEPS
    )
    train_temperature: float | None = setting(
        None,
        "temperature of the trained log-probs; none: the one of sampling",
        resume="fixed",
        above=0,
        high=1000,
    )
    off_policy_lag: int = setting(
        0, "steps by which the sampling policy trails", resume="next", low=0, high=1024
    )
    replay_share: float = setting(
        0.0, "share of a batch taken from earlier rollouts", resume="next", low=0, high=1
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    every: int = setting(
        10,
        "steps between evaluations; 0: at the start and the end alone",
        resume="next",
        low=0,
        high=STEPS,
    )
    size: int = setting(256, "held-out problems", resume="fixed", low=1, high=ROWS)
    k: int = setting(
        4,
        "samples a problem for pass@k and avg@k; 0: greedy alone",
        resume="fixed",
        low=0,
        high=ROWS,
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = setting(
        50, "steps between checkpoints; 0: at the end alone", resume="next", low=0, high=STEPS
    )
    keep: int = setting(2, "how many to keep", resume="next", low=1, high=STEPS)
    grace: float = setting(
        20.0,
        "seconds a stop signal waits for an update to end; then the last checkpoint counts",
        resume="next",
        low=0,
        high=DAY,
    )


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    sinks: list = setting([], "beside metrics.jsonl: tensorboard, trackio, wandb", resume="now")
    project: str = setting("proxpo", "name of the project in trackio and wandb", resume="now")
    samples: int = setting(
        4, "responses a step written to samples.jsonl", resume="next", low=0, high=ROWS
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on; two runs with equal ones give equal curves on a CPU."""

    seed: int = setting(
        0,
        "every stream of random numbers derives from it",
        resume="fixed",
        low=-(2**63),
        high=2**63 - 1,
    )
    out: str | None = setting(None, "folder of the run; none: runs/METHOD-TASK-SEED", resume="now")
    method: str = setting(
        "isopo", "a method of the catalogue (see `proxpo methods`)", resume="fixed"
    )
    recipe: dict = setting(
        {}, "options of the method and stages in place of its own", resume="fixed"
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def folder(self) -> str:
        """Where the run goes."""
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in self.task.name)
        return self.out or f"runs/{self.method}-{name.strip('-.')}-seed{self.seed}"

    @property
    def updates(self) -> int:
        """Optimizer steps on each rollout."""
        return self.train.updates_per_rollout or self.train.mini_batches

    @property
    def train_temperature(self) -> float:
        """Temperature at which the trained policy's log-probabilities are taken."""
        return self.train.train_temperature or self.rollout.temperature

    def make_recipe(self) -> Recipe:
        """The method with its settings; the reason where they do not fit."""
        from proxpo.settings import make_recipe

        return make_recipe(self.method, self.recipe)


class Setting(NamedTuple):
    """One documented setting."""

    path: str
    kind: str
    default: Any
    doc: str
    value: Any
    resume: Resume


def explain(config: Config | None = None) -> list[Setting]:
    """Every setting in order, with its default, its meaning and its value in this config."""
    listed: list[Setting] = []
    for path, kind, leaf in _leaves(Config):
        default, value = (
            getattr(_section(whole, path), leaf.name) for whole in (Config(), config or Config())
        )
        info = leaf.metadata
        listed.append(Setting(path, _shown(kind), default, info["doc"], value, info["resume"]))
    return listed


def build(tree: Mapping[str, Any]) -> Config:
    """A checked Config from nested plain values; unknown names are refused with the nearest."""
    config = _made(Config, tree, "")
    train, rollout = config.train, config.rollout
    if config.updates % train.mini_batches:
        raise ProxpoError(
            f"train.updates_per_rollout={config.updates} must be a multiple of "
            f"train.mini_batches={train.mini_batches}, or parts of a rollout go unused"
        )
    if rollout.prompts_per_step % train.mini_batches:
        raise ProxpoError(
            f"rollout.prompts_per_step={rollout.prompts_per_step} cannot be cut into "
            f"train.mini_batches={train.mini_batches} equal parts"
        )
    if train.replay_share == 1:
        raise ProxpoError("train.replay_share=1 leaves no room for new data; expected below 1")
    for sink in config.log.sinks:
        resolve(str(sink), SINKS, what="sink of log.sinks")
    for names, rows in (
        (
            "rollout.prompts_per_step x rollout.samples_per_prompt",
            rollout.prompts_per_step * rollout.samples_per_prompt,
        ),
        ("evaluate.size x evaluate.k", config.evaluate.size * config.evaluate.k),
    ):
        if rows > ROWS:
            raise ProxpoError(f"{names} is at most {ROWS:,} responses, got {rows:,}")
    return config


def as_dict(config: Config) -> dict[str, Any]:
    """The settings as plain values: what `build` takes."""
    return asdict(config)


class Change(NamedTuple):
    """A setting that differs between two configs."""

    path: str
    before: Any
    after: Any
    resume: Resume

    def __str__(self) -> str:
        return f"{self.path}: {self.before} -> {self.after}"


def differences(before: Config, after: Config) -> list[Change]:
    """Every setting that differs, in the order of their declaration."""
    return [
        Change(path, old, new, leaf.metadata["resume"])
        for path, _, leaf in _leaves(Config)
        if (old := getattr(_section(before, path), leaf.name))
        != (new := getattr(_section(after, path), leaf.name))
    ]


def changes(before: Config, after: Config) -> list[str]:
    """What differs, a line each: `train.lr: 3e-05 -> 1e-05`."""
    return [str(change) for change in differences(before, after)]


def check_resume(before: Config, after: Config, *, step: int, where: Path) -> list[Change]:
    """The changes that take effect on resuming after `step`; refused where one cannot.

    `where`: the checkpoint that was made with the settings `before`.
    """
    changed = differences(before, after)
    fixed = [str(change) for change in changed if change.resume == "fixed"]
    if fixed:
        weights = "" if before.model.lora else f", from these weights with --model {where}/model"
        raise ProxpoError(
            f"{where} does not fit these settings ({'; '.join(fixed)}): a run keeps what it was "
            f"started with; --out DIR begins a new one{weights}"
        )
    late = [str(change) for change in changed if change.resume == "next"]
    if late and step >= after.train.steps:
        raise ProxpoError(
            f"{where} is the end of a finished run, so a change has no effect ({'; '.join(late)}): "
            f"train.steps above {step} continues it, --out DIR begins a new one"
        )
    return changed


def place(key: str, options: Collection[str]) -> list[str]:
    """The path of a setting given by path, by unique last word, or as a setting of the method.

    `options` are the method's own; a kind of stage is a setting of every method.
    """
    own = key in options or key.split(".")[0].rstrip("+") in KINDS
    known = {path: path.split(".") for path, *_ in _leaves(Config)}
    head = key.split(".")
    for path in (path for path in known.values() if head[: len(path)] == path):
        rest = head[len(path) :]
        if not rest:
            return path
        # Inside `recipe` a dot belongs to the key: recipe.ratio.q is the option q of the ratio.
        return [*path, ".".join(rest)] if path == ["recipe"] else [*path, *rest]
    if len(head) == 1 and head[0] in SECTIONS:
        if "name" in {one.name for one in fields(SECTIONS[head[0]])}:
            return [head[0], "name"]
        raise ProxpoError(f"'{key}' is a group of settings: write {key}.NAME=VALUE")
    fitting = [path for path in known.values() if len(head) == 1 and path[-1] == head[0]]
    if len(fitting) + own > 1:
        paths = [".".join(path) for path in fitting] + ([f"recipe.{key}"] if own else [])
        raise ProxpoError(f"'{key}' could be {' or '.join(paths)}: write one of them in full")
    if fitting:
        return fitting[0]
    if own:
        return ["recipe", key]
    raise ProxpoError(f"unknown setting '{key}'{_hint(key, known, options)}")


def _hint(key: str, known: Collection[str], options: Collection[str]) -> str:
    last = (path.split(".")[-1] for path in known)
    words = known if "." in key else [*last, *SECTIONS, *options, *KINDS]
    hint = nearest(key, words)
    return hint if "did you mean" in hint else "; `proxpo train --explain` lists them"


SECTIONS: dict[str, Any] = {one.name: one.type for one in fields(Config) if is_dataclass(one.type)}


@functools.cache
def _leaves(kind: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(path, type, field) of every setting."""
    hints = typing.get_type_hints(kind)
    found: list[tuple[str, Any, Any]] = []
    for one in fields(kind):
        path = f"{prefix}{one.name}"
        inner, nested = hints[one.name], is_dataclass(hints[one.name])
        found += _leaves(inner, f"{path}.") if nested else [(path, inner, one)]
    return found


def _section(config: Config, path: str) -> Any:
    head, dot, _ = path.partition(".")
    return getattr(config, head) if dot else config


def _made(kind: Any, tree: Any, prefix: str) -> Any:
    if not isinstance(tree, Mapping):
        raise ProxpoError(f"'{prefix.rstrip('.')}' takes a block of settings, got {brief(tree)}")
    hints = typing.get_type_hints(kind)
    named = {one.name: one for one in fields(kind)}
    for key in tree:
        if key not in named:
            raise ProxpoError(f"unknown setting '{prefix}{key}'{nearest(str(key), named)}")
    values: dict[str, Any] = {}
    for key, value in tree.items():
        inner, path = hints[key], f"{prefix}{key}"
        if is_dataclass(inner):
            values[key] = _made(inner, value, f"{path}.")
        else:
            values[key] = _checked(value, inner, named[key].metadata, path)
    return kind(**values)


def _checked(value: Any, kind: Any, info: Mapping[str, Any], path: str) -> Any:
    """The value in its type and within its range."""
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if list in allowed and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    for container in (dict, list):
        if container in allowed and value is None and type(None) not in allowed:
            value = container()  # an empty block of a file
        if container in allowed and not (isinstance(value, container) or value is None):
            raise ProxpoError(f"{path} takes a {container.__name__}, got {brief(value)}")
    value = coerce(value, kind, option=path)
    if isinstance(value, str) and ("\0" in value or len(value) > TEXT):
        raise ProxpoError(f"{path} is text of at most {TEXT:,} characters, got {brief(value)}")
    if isinstance(value, (dict, list)):
        _check_plain(value, path)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high, above = info["low"], info["high"], info["above"]
        if (low is not None and value < low) or (above is not None and value <= above):
            bound = f"at least {_number(low)}" if low is not None else f"above {_number(above)}"
            raise ProxpoError(f"{path} is {bound}, got {brief(value)}")
        if high is not None and value > high:
            raise ProxpoError(f"{path} is at most {_number(high)}, got {brief(value)}")
    return value


def _check_plain(value: Any, path: str) -> None:
    """Blocks of options hold text, numbers, lists and blocks; their names are text."""
    waiting = [(path, value)]
    seen = 0
    while waiting:
        where, inner = waiting.pop()
        seen += 1
        if seen > VALUES:
            raise ProxpoError(f"{path} holds more than {VALUES:,} values")
        if isinstance(inner, Mapping):
            for key in inner:
                if not isinstance(key, str):
                    raise ProxpoError(f"{where}: a name is text, got {brief(key)}")
            waiting += [(f"{where}.{key}"[:80], deeper) for key, deeper in inner.items()]
        elif isinstance(inner, (list, tuple)):
            waiting += [(where, deeper) for deeper in inner]
        elif not (inner is None or isinstance(inner, (str, int, float))):
            raise ProxpoError(f"{where} takes text, numbers, lists and blocks, got {brief(inner)}")
        elif isinstance(inner, int) and not abs(inner) < 2**63:
            raise ProxpoError(f"{where} is an integer beyond 64 bits, got {brief(inner)}")


def _number(value: int | float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _shown(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "|".join(typing.get_args(kind))
    if isinstance(kind, types.UnionType):
        return " or ".join(_shown(one) for one in typing.get_args(kind))
    return "none" if kind is type(None) else kind.__name__


__all__ = [
    "SECTIONS",
    "Change",
    "Config",
    "Resume",
    "Setting",
    "as_dict",
    "build",
    "changes",
    "check_resume",
    "differences",
    "explain",
    "place",
]
