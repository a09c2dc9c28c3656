# ruff: noqa: RUF009  (`setting` makes a dataclass field, it does not compute a default)
"""The settings of a run: nested frozen dataclasses, every field with its line of documentation."""

import functools
import math
import typing
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from proxpo.recipes import Procedure
from proxpo.settings import make_method, make_recipe
from proxpo.types import Recipe

Optimizer = Literal["adamw", "sgd", "muon", "soap", "shampoo", "kfac"]
Schedule = Literal["constant", "linear", "cosine"]
Dtype = Literal["auto", "float32", "bfloat16", "float64"]
Resume = Literal["fixed", "next", "now"]


ROWS = 1 << 20  # responses of one rollout or one evaluation
TOKENS = 1 << 24
STEPS = 1_000_000_000
DAY = 86_400
LARGEST_REWARD = 1e15  # beyond it the squares of a batch leave float32
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
    options: dict = setting(
        {}, "options of a network that is built, such as hidden", resume="fixed"
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N", resume="now")
    dtype: Dtype = setting(
        "auto", "of the arithmetic; auto: bfloat16 on a GPU, float32 on a CPU", resume="next"
    )
    gradient_checkpointing: bool | Literal["auto"] = setting(
        False,
        "recompute activations to save memory; auto: on a GPU, where a row would not fit "
        "otherwise; unset: auto for every model but the one in the box",
        resume="next",
    )
    lora: dict | None = setting(
        None, "options of peft's LoraConfig; none trains every weight", resume="fixed"
    )


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    name: str = setting(
        "arithmetic",
        "arithmetic[:LEVEL], arithmetic-chat, arms, calculator, column-sums[:LEVEL], dialogue, "
        "gsm8k[:PATH], reasoning-gym:NAME, textarena:GAME, verifiers:TASKSET, FILE",
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
    backend: Literal["local", "vllm", "auto"] = setting(
        "local",
        "what samples: local, vllm, or auto, the faster for this model: local where its own "
        "decoder runs it, else vllm where it is installed",
        resume="now",
    )
    options: dict = setting({}, "options of the backend", resume="now")
    prompts_per_step: int = setting(64, "prompts a step", resume="next", low=1, high=ROWS)
    samples_per_prompt: int = setting(
        8, "responses to each prompt", resume="next", low=1, high=ROWS
    )
    max_prompt: int = setting(512, "longest prompt, in tokens", resume="fixed", low=1, high=TOKENS)
    max_tokens: int = setting(
        8,
        "longest response, or turn of one, in tokens; unset: the task's, such as 512 for gsm8k",
        resume="fixed",
        low=1,
        high=TOKENS,
    )
    temperature: float = setting(1.0, "sampling temperature", resume="fixed", above=0, high=1000)
    top_p: float = setting(
        1.0, "nucleus of the sampling distribution", resume="next", above=0, high=1
    )
    thoughts: int = setting(
        0,
        "latent thoughts before each response: hidden states that are fed back as inputs",
        resume="fixed",
        low=0,
        high=1024,
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
    micro_batch: int | Literal["auto"] | None = setting(
        None,
        "sequences in one backward pass; none: all; auto: as many as memory allows, of like "
        "length; unset: auto for every model but the one in the box",
        resume="now",
        low=1,
        high=ROWS,
    )
    graphs: Literal["auto", "on", "off"] = setting(
        "auto", "replay the policy's passes as CUDA graphs; auto: where it can", resume="now"
    )
    optimizer: Optimizer = setting(
        "adamw", "adamw, sgd, muon, soap, shampoo or kfac", resume="fixed"
    )
    optimizer_options: dict = setting(
        {}, "further options of the optimizer, such as betas", resume="fixed"
    )
    lr: float = setting(
        5e-4,
        "learning rate; unset: with AdamW 5e-4 for the model in the box, 1e-6 for any other, 1e-5 "
        "for LoRA; other optimizers have rates of their own",
        resume="next",
        low=0,
        high=LARGE,
    )
    weight_decay: float = setting(0.01, "decoupled weight decay", resume="next", low=0, high=LARGE)
    grad_clip: float | None = setting(
        1.0,
        "largest norm of the gradient, after the method's transform if it has one (norms of ISOPO "
        "are in the thousands, so every update gets a gradient of this norm); none: no limit",
        resume="next",
        above=0,
        high=LARGE,
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
    on_no_signal: Literal["stop", "warn"] = setting(
        "stop",
        "where no gradient comes in the first three steps, for a cause that remains (all responses "
        "cut, no answer found, all rewards equal and below the best): stop, or warn and go on",
        resume="next",
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
    keep: int = setting(
        2,
        "how many to keep; 0: none is written, and a run that was stopped begins anew",
        resume="next",
        low=0,
        high=STEPS,
    )
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
    batch_every: int = setting(
        0,
        "steps between batches written to batches/, for `proxpo inspect --run`; 0: none",
        resume="next",
        low=0,
        high=STEPS,
    )
    pictures: bool = setting(
        True,
        "draw curves.png, report.html and, of a generative model, samples.png at the end",
        resume="now",
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on; two runs with equal ones give equal curves on a CPU."""

    seed: int = setting(
        0,
        "every stream of random numbers derives from it",
        resume="fixed",
        low=0,
        high=2**63 - 1,
    )
    out: str | None = setting(None, "folder of the run; none: runs/METHOD-TASK-seedN", resume="now")
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
        """Folder of the run."""
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

    def rate_factor(self, step: int) -> float:
        """Factor on the learning rate: warm-up, then constant, linear or cosine decay."""
        train = self.train
        factor = min(1.0, (step + 1) / train.warmup_steps) if train.warmup_steps else 1.0
        done = step / train.steps
        decay = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return factor * decay[train.lr_schedule]

    def make_recipe(self) -> Recipe:
        """Makes the method's recipe with its settings; raises if they do not fit."""
        return make_recipe(self.method, self.recipe)

    def make_method(self) -> Recipe | Procedure:
        """Makes the method with its settings, whether it is a recipe or not."""
        return make_method(self.method, self.recipe)


SECTIONS: dict[str, Any] = {
    member.name: member.type for member in fields(Config) if is_dataclass(member.type)
}


@functools.cache
def leaves(kind: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(path, type, field) of every setting."""
    hints = typing.get_type_hints(kind)
    listed: list[tuple[str, Any, Any]] = []
    for member in fields(kind):
        path = f"{prefix}{member.name}"
        inner, nested = hints[member.name], is_dataclass(hints[member.name])
        listed += leaves(inner, f"{path}.") if nested else [(path, inner, member)]
    return listed


__all__ = ["ROWS", "SECTIONS", "Config", "Resume", "leaves"]
