"""Defaults that fit task and model, for settings that neither a file nor an option gives.

    rollout.max_tokens             the longest answer that the task declares
    train.lr                       by optimizer, for the model in the box, all weights, or LoRA
    train.micro_batch              auto for every model but the one in the box
    model.gradient_checkpointing   the same

They depend on settings and on files alone, never on the machine.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from proxpo.models import TINY, load_tokenizer
from proxpo.recipes import method
from proxpo.train._schema import SECTIONS, Config
from proxpo.train._settings import build_config
from proxpo.train.domains import LANGUAGE, default_settings, domain_of
from proxpo.train.tasks import longest_answer


class Rates(NamedTuple):
    """Learning rates of an optimizer: the model in the box, all weights of another one, LoRA."""

    box: float
    weights: float
    lora: float


# Of the model in the box as measured (docs/results: sizes, optimizers, sgd). Muon and SOAP take the
# rates of AdamW for other models. Of plain steps the rate is the length of one whose gradient is
# cut to 1: 0.01 as measured on SmolLM2 (worked-sgd).
RATES: dict[str, Rates] = {
    "adamw": Rates(5e-4, 1e-6, 1e-5),
    "muon": Rates(1e-3, 1e-6, 1e-5),
    "soap": Rates(1e-3, 1e-6, 1e-5),
    "shampoo": Rates(6e-3, 1e-5, 1e-4),
    "kfac": Rates(5e-3, 1e-5, 1e-4),
    "sgd": Rates(0.1, 0.01, 0.01),
}


class Fitted(NamedTuple):
    """A default and the reason for it: the task, the model, or its adapter."""

    value: Any
    origin: str


def fitted_defaults(config: Config) -> dict[str, Fitted]:
    """The defaults by path that fit the config's task, model and optimizer."""
    if domain_of(config.task.name) is not LANGUAGE:
        return {}
    task, model, train = config.task, config.model, config.train
    box = is_in_the_box(model.name)
    rates, kind = RATES[train.optimizer], f"model {model.name}"
    rate = rates.box if box else rates.weights if model.lora is None else rates.lora
    adapter = ", LoRA" if model.lora is not None and not box else ""
    longest = longest_answer(
        task.name,
        {**task.options, "reward": task.reward},
        tokenizer=lambda: load_tokenizer(model.name),
        named=model.name,
    )
    return {
        "rollout.max_tokens": Fitted(longest, f"task {task.name}"),
        "train.lr": Fitted(rate, f"{train.optimizer}, {kind}{adapter}"),
        "train.micro_batch": Fitted(None if box else "auto", kind),
        "model.gradient_checkpointing": Fitted(False if box else "auto", kind),
    }


def with_fitted(config: Config, given: Collection[str]) -> tuple[Config, dict[str, Fitted]]:
    """The config with the defaults that fit it, but for the settings `given`; those it took."""
    taken = {path: x for path, x in fitted_defaults(config).items() if path not in given}
    for section in SECTIONS:
        values = {
            path.partition(".")[2]: fitted.value
            for path, fitted in taken.items()
            if path.startswith(f"{section}.")
        }
        if values:
            part = replace(getattr(config, section), **values)
            config = replace(config, **{section: part})
    return config, taken


def default_config(config: Config) -> Config:
    """A run of the same method, task, model and optimizer with no other setting changed."""
    tree: dict[str, Any] = {}
    defaults = default_settings(method(config.method), config.task.name)
    for path, value in defaults.items():
        section, _, name = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    values = {path: fitted.value for path, fitted in fitted_defaults(config).items()}
    for path, value in values.items():
        section, _, name = path.partition(".")
        tree.setdefault(section, {}).setdefault(name, value)
    return build_config(tree)


def is_in_the_box(name: str) -> bool:
    """True for the model in the box and for folders of models with its alphabet, trained or not."""
    if name == "tiny":
        return True
    try:
        shape = json.loads((Path(name).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(shape, Mapping) and _kind(shape) == _own_kind()


def _kind(shape: Mapping[str, Any]) -> tuple[Any, Any]:
    return shape.get("model_type"), shape.get("vocab_size")


@cache
def _own_kind() -> tuple[Any, Any]:
    return _kind(json.loads((TINY / "config.json").read_text(encoding="utf-8")))


__all__ = ["RATES", "default_config", "fitted_defaults", "is_in_the_box", "with_fitted"]
