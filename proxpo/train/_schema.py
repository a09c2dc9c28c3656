# ruff: noqa: RUF009  (`setting` makes a dataclass field, it does not compute a default)
"""The settings of a run: nested frozen dataclasses, every field with its line of documentation."""

import functools
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, NamedTuple

from proxpo.errors import ProxpoError, nearest
from proxpo.options import coerce
from proxpo.types import KINDS, Recipe

Optimizer = Literal["adamw", "muon", "soap", "shampoo", "kfac"]
Schedule = Literal["constant", "linear", "cosine"]
Dtype = Literal["auto", "float32", "bfloat16", "float64"]


def setting(
    default: Any,
    doc: str,
    *,
    low: int | None = None,
    high: int | None = None,
    above: int | None = None,
) -> Any:
    """A field with its documentation and the range it must lie in."""
    info = {"doc": doc, "low": low, "high": high, "above": above}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=info)
    return field(default=default, metadata=info)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name: str = setting("tiny", "tiny, smollm2, a folder, or a Hugging Face id")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    dtype: Dtype = setting("auto", "of the arithmetic; auto: bfloat16 on a GPU, float32 on a CPU")
    gradient_checkpointing: bool = setting(False, "recompute activations to save memory")
    lora: dict | None = setting(None, "options of peft's LoraConfig; none trains every weight")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    name: str = setting(
        "arithmetic",
        "arithmetic[:LEVEL], arithmetic-chat, calculator, gsm8k[:PATH], reasoning-gym:NAME, FILE",
    )
    options: dict = setting({}, "options of the task, such as digits or held_out")
    problems: int | None = setting(
        None,
        "train on the first so many different problems; none: on all, but 8 steps' worth of a "
        "generated task where the method learns from revisits (knapsack-rl, palu, dcpo)",
        low=1,
    )
    reward: str | None = setting(None, "FILE.py:FUNCTION instead of the task's own reward")
    correct_above: float | None = setting(
        None,
        "a response is right where its reward is above this; none: where the reward function says "
        "so, as 'acc' or 'correct'",
    )
    reward_workers: int = setting(2, "processes that run reward functions", low=1)
    reward_timeout: float = setting(
        10.0,
        "seconds one sample's reward may take; a call for many has as many times that",
        above=0,
    )
    reward_max_failed: float = setting(
        0.5, "share of a batch whose rewards may fail before the run stops", low=0, high=1
    )
    drop_long: bool = setting(False, "leave out prompts over max_prompt instead of refusing them")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    backend: Literal["local", "vllm"] = setting("local", "what samples: local or vllm")
    options: dict = setting({}, "options of the backend")
    prompts_per_step: int = setting(64, "prompts a step", low=1)
    samples_per_prompt: int = setting(8, "responses to each prompt", low=1)
    max_prompt: int = setting(512, "longest prompt, in tokens", low=1)
    max_tokens: int = setting(8, "longest response, or turn of one, in tokens", low=1)
    temperature: float = setting(1.0, "sampling temperature", above=0)
    top_p: float = setting(1.0, "nucleus of the sampling distribution", above=0, high=1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int = setting(100, "rollouts, each followed by its updates", low=1)
    updates_per_rollout: int | None = setting(
        None, "optimizer steps on each rollout; none: one pass, that is mini_batches", low=1
    )
    mini_batches: int = setting(1, "parts a rollout is cut into, one optimizer step each", low=1)
    micro_batch: int | None = setting(None, "sequences in one backward pass; none: all", low=1)
    optimizer: Optimizer = setting("adamw", "adamw, muon, soap, shampoo or kfac")
    optimizer_options: dict = setting({}, "further options of the optimizer, such as betas")
    lr: float = setting(3e-5, "learning rate", low=0)
    weight_decay: float = setting(0.01, "decoupled weight decay", low=0)
    grad_clip: float | None = setting(1.0, "largest norm of the gradient; none: no limit", above=0)
    lr_schedule: Schedule = setting("constant", "constant, linear or cosine, over `steps`")
    warmup_steps: int = setting(0, "steps over which the rate rises from 0", low=0)
    train_temperature: float | None = setting(
        None, "temperature of the trained log-probs; none: the one of sampling", above=0
    )
    off_policy_lag: int = setting(0, "steps by which the sampling policy trails", low=0)
    replay_share: float = setting(
        0.0, "share of a batch taken from earlier rollouts", low=0, high=1
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    every: int = setting(10, "steps between evaluations; 0: at the start and the end alone", low=0)
    size: int = setting(256, "held-out problems", low=1)
    k: int = setting(4, "samples a problem for pass@k and avg@k; 0: greedy alone", low=0)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = setting(50, "steps between checkpoints; 0: at the end alone", low=0)
    keep: int = setting(2, "how many to keep", low=1)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    sinks: list = setting([], "beside metrics.jsonl: tensorboard, trackio, wandb")
    project: str = setting("proxpo", "name of the project in trackio and wandb")
    samples: int = setting(4, "responses a step written to samples.jsonl", low=0)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on; two runs with equal ones give equal curves on a CPU."""

    seed: int = setting(0, "every stream of random numbers derives from it")
    out: str | None = setting(None, "folder of the run; none: runs/METHOD-TASK-SEED")
    method: str = setting("isopo", "a method of the catalogue (see `proxpo methods`)")
    recipe: dict = setting({}, "options of the method and stages in place of its own")
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


def explain() -> list[Setting]:
    """Every setting in order, for `--help` and the docs."""
    found: list[Setting] = []
    for path, kind, one in _leaves(Config):
        default = getattr(_section(Config(), path), one.name)
        found.append(Setting(path, _shown(kind), default, one.metadata["doc"]))
    return found


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
    return config


def as_dict(config: Config) -> dict[str, Any]:
    """The settings as plain values: what `build` takes."""
    return asdict(config)


def changes(before: Config, after: Config) -> list[str]:
    """What differs, a line each: `train.lr: 3e-05 -> 1e-05`."""
    return [
        f"{path}: {old} -> {new}"
        for path, _, one in _leaves(Config)
        if (old := getattr(_section(before, path), one.name))
        != (new := getattr(_section(after, path), one.name))
    ]


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
        raise ProxpoError(f"'{prefix.rstrip('.')}' takes a block of settings, got {tree!r}")
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
        if container in allowed and not (isinstance(value, container) or value is None):
            raise ProxpoError(f"{path} takes a {container.__name__}, got {value!r}")
    value = coerce(value, kind, option=path)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high, above = info["low"], info["high"], info["above"]
        if (low is not None and value < low) or (above is not None and value <= above):
            bound = f"at least {low:g}" if low is not None else f"above {above:g}"
            raise ProxpoError(f"{path} is {bound}, got {value}")
        if high is not None and value > high:
            raise ProxpoError(f"{path} is at most {high:g}, got {value}")
    return value


def _shown(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "|".join(typing.get_args(kind))
    if isinstance(kind, types.UnionType):
        return " or ".join(_shown(one) for one in typing.get_args(kind))
    return "none" if kind is type(None) else kind.__name__


__all__ = ["SECTIONS", "Config", "Setting", "as_dict", "build", "changes", "explain", "place"]
