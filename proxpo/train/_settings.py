"""Settings built from plain values, checked, explained, found by name and compared."""

import types
import typing
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from proxpo.errors import ProxpoError, fold, nearest, resolve
from proxpo.runs.sinks import SINKS
from proxpo.stages._options import brief, coerce
from proxpo.train._schema import ROWS, SECTIONS, Config, Resume, leaves
from proxpo.types import KINDS

VALUES = 10_000  # in one block of options
TEXT = 4096  # characters, as of a path


# Arguments of TRL's GRPOConfig, and the setting that is the same thing.
TRL_NAMES = {
    "output_dir": "out",
    "seed": "seed",
    "max_steps": "train.steps",
    "learning_rate": "train.lr",
    "lr_scheduler_type": "train.lr_schedule",
    "warmup_steps": "train.warmup_steps",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.grad_clip",
    "optim": "train.optimizer",
    "num_generations": "rollout.samples_per_prompt",
    "generation_batch_size": "rollout.prompts_per_step",
    "steps_per_generation": "train.mini_batches",
    "num_iterations": "train.updates_per_rollout",
    "per_device_train_batch_size": "train.micro_batch",
    "max_completion_length": "rollout.max_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "use_vllm": "rollout.backend",
    "vllm_gpu_memory_utilization": "rollout.options",
    "bf16": "model.dtype",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "eval_steps": "evaluate.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "report_to": "log.sinks",
    "num_completions_to_print": "log.samples",
}
# With words that are usual elsewhere.
OTHER_NAMES = TRL_NAMES | {
    "batch_size": "rollout.prompts_per_step",
    "epochs": "train.updates_per_rollout",
    "group_size": "rollout.samples_per_prompt",
    "max_new_tokens": "rollout.max_tokens",
}


class Setting(NamedTuple):
    """One documented setting. origin: where its value in a config comes from, if that is known."""

    path: str
    kind: str
    default: Any
    doc: str
    value: Any
    resume: Resume
    origin: str = ""


def explain(
    config: Config | None = None, origins: Mapping[str, str] | None = None
) -> list[Setting]:
    """Every setting in order, with its default, its meaning and its value in this config.

    origins: of the values by path, see `load_explained`
    """
    listed: list[Setting] = []
    for path, kind, leaf in leaves(Config):
        default, value = (
            getattr(_section(whole, path), leaf.name) for whole in (Config(), config or Config())
        )
        info, origin = leaf.metadata, "" if origins is None else origins.get(path, "default")
        listed.append(
            Setting(path, _shown(kind), default, info["doc"], value, info["resume"], origin)
        )
    return listed


def build_config(tree: Mapping[str, Any]) -> Config:
    """Builds a checked Config from nested plain values; refuses unknown names with the nearest."""
    config = _made(Config, tree, "")
    train, rollout = config.train, config.rollout
    if config.updates % train.mini_batches:
        raise ProxpoError(
            f"train.updates_per_rollout={config.updates} must be a multiple of "
            f"train.mini_batches={train.mini_batches}, or parts of a rollout go unused"
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
    """The settings as plain values: what `build_config` takes."""
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
        for path, _, leaf in leaves(Config)
        if (old := getattr(_section(before, path), leaf.name))
        != (new := getattr(_section(after, path), leaf.name))
    ]


def changes(before: Config, after: Config) -> list[str]:
    """Differing settings, a line each: `train.lr: 3e-05 -> 1e-05`."""
    return [str(change) for change in differences(before, after)]


def check_resume(before: Config, after: Config, *, step: int, where: Path) -> list[Change]:
    """The changes that take effect on resuming after `step`; refuses those that cannot.

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
    known, head = _paths(), key.split(".")
    for count in range(1, len(head) + 1):
        if path := known.get(".".join(head[:count])):
            rest = head[count:]
            if rest and path == ["recipe"]:  # recipe.ratio.q is the option q of the ratio
                rest = [".".join(rest)]
            return [*path, *rest]
    if len(head) == 1 and head[0] in SECTIONS:
        if "name" in {member.name for member in fields(SECTIONS[head[0]])}:
            return [head[0], "name"]
        raise ProxpoError(f"'{key}' is a group of settings: write {key}.NAME=VALUE")
    fitting = [path for path in known.values() if len(head) == 1 and path[-1] == head[0]]
    if len(fitting) + own > 1:
        paths = [".".join(path) for path in fitting] + ([f"recipe.{key}"] if own else [])
        raise ProxpoError(f"'{key}' could be {' or '.join(paths)}: write one of them in full")
    if fitting:
        return [*fitting[0]]
    if own:
        return ["recipe", key]
    raise ProxpoError(f"unknown setting '{key}'{_hint(key, known, options)}")


@cache
def _paths() -> dict[str, list[str]]:
    """The words of every setting's path, by the path."""
    return {path: path.split(".") for path, *_ in leaves(Config)}


def _hint(key: str, known: Collection[str], options: Collection[str]) -> str:
    if path := OTHER_NAMES.get(fold(key.split(".")[-1])):
        return f"; did you mean '{path}'?"
    words = Counter([*(path.split(".")[-1] for path in known), *options, *KINDS])
    # A word that several settings end in is refused, so their paths stand for it.
    paths = [path for path in known if "." in key or words[path.split(".")[-1]] > 1]
    single = [] if "." in key else [word for word in words if words[word] == 1]
    hint = nearest(key, [*paths, *single, *([] if "." in key else SECTIONS)])
    return hint if "did you mean" in hint else "; `proxpo train --explain` lists them"


def _section(config: Config, path: str) -> Any:
    head, dot, _ = path.partition(".")
    return getattr(config, head) if dot else config


def _made(kind: Any, tree: Any, prefix: str) -> Any:
    if not isinstance(tree, Mapping):
        raise ProxpoError(f"'{prefix.rstrip('.')}' takes a block of settings, got {brief(tree)}")
    hints = typing.get_type_hints(kind)
    named = {member.name: member for member in fields(kind)}
    for key in tree:
        if key not in named:
            path = OTHER_NAMES.get(fold(str(key)))
            hint = f"; did you mean '{path}'?" if path else nearest(str(key), named)
            raise ProxpoError(f"unknown setting '{prefix}{key}'{hint}")
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
    """Refuses blocks of options that hold more than text, numbers, lists and blocks."""
    waiting = [(path, value)]
    count = 0
    while waiting:
        where, inner = waiting.pop()
        count += 1
        if count > VALUES:
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
        return " or ".join(_shown(part) for part in typing.get_args(kind))
    return "none" if kind is type(None) else kind.__name__


__all__ = [
    "Change",
    "Setting",
    "as_dict",
    "build_config",
    "changes",
    "check_resume",
    "differences",
    "explain",
    "place",
]
