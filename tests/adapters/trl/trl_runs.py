"""Short real runs of TRL on the model in the box: few prompts, a handful of tokens."""

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from accelerate.utils import imports
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding
from trl import GRPOConfig, GRPOTrainer

from proxpo.adapters.trl import ProxpoTrainer
from proxpo.adapters.trl._optimizer_step import ROW
from proxpo.models import Policy, load_policy

gc.freeze()  # every run of a Trainer ends with a collection, which need not look at the libraries
# Asked dozens of times in a run, at a few milliseconds each.
imports._is_package_available = cache(imports._is_package_available)
PAIRS = [(12 + 7 * n % 31, 34 - n) for n in range(24)]
SMALL: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_completion_length": 3,
    "max_steps": 20,
    "logging_steps": 1,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "pad_to_multiple_of": None,  # as the own loop, which pads to the longest
    "seed": 3,
}


@contextmanager
def plain_layers() -> Iterator[None]:
    """Without oneDNN, whose calls take ten times as long as the arithmetic of layers this small."""
    before, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    yield
    torch.backends.mkldnn.enabled = before


class ExactRMSNorm(Qwen3RMSNorm):
    """Without the rounding to float32 that transformers does whatever the precision."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        square = hidden_states.square().mean(dim=-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(square + self.variance_epsilon)


class ExactRotary(Qwen3RotaryEmbedding):
    """The same of the angles: rows with more padding in front see the same model."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        half = self.inv_freq.numel()
        powers = torch.arange(half, dtype=x.dtype) / half
        angles = position_ids[..., None] / self.config.rope_parameters["rope_theta"] ** powers
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


@cache
def policy(dtype: str = "float32") -> Policy:
    """The model in the box, loaded once; its runs train copies of it."""
    found = load_policy("tiny", dtype=dtype)
    if dtype == "float64":
        for module in found.model.modules():
            for given, exact in ((Qwen3RMSNorm, ExactRMSNorm), (Qwen3RotaryEmbedding, ExactRotary)):
                if isinstance(module, given):
                    module.__class__ = exact
    return found


@cache
def questions() -> Dataset:
    return Dataset.from_list([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in PAIRS])


def closeness(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Never the same for two different completions, so that every group has something to say."""
    return [
        float(text == right) + sum(map(ord, text)) / 300 for text, right in zip(completions, answer)
    ]


def right_or_wrong(completions: list[str], answer: list[str], **given: Any) -> list[float]:
    """1 or 0, for methods that want labels."""
    scores = closeness(completions, answer, **given)
    return [float(score > sum(scores) / len(scores)) for score in scores]


def config(out: Any, **changes: Any) -> GRPOConfig:
    return GRPOConfig(output_dir=str(out), **{**SMALL, **changes})


def trainer(
    out: Any, recipe: Any = None, *, options: Any = None, kind: Any = ProxpoTrainer, **changes: Any
) -> Any:
    """A ProxpoTrainer, or TRL's own where no recipe is given; changes go to GRPOConfig."""
    base = policy(changes.pop("dtype", "float32"))
    ours = {} if recipe is None else {"recipe": recipe, "recipe_options": options}
    host = GRPOTrainer if recipe is None else kind
    names = ("peft_config", "rollout_func", "callbacks", "eval_dataset", "optimizers")
    names = (*names, "batch_every", "graphs")
    ours |= {name: changes.pop(name) for name in names if name in changes}
    model = changes.pop("model", None) or copy.deepcopy(base.model)
    reward = changes.pop("reward", closeness)
    data = questions().select(range(changes.pop("prompts", len(PAIRS))))
    made = host(
        model, reward, config(out, **changes), data, processing_class=base.tokenizer,
        **ours,
    )  # fmt: skip
    made.remove_callback(PrinterCallback)
    return made


def losses(run: Any) -> list[float]:
    return [row["loss"] for row in run.state.log_history if "loss" in row]


def seen(run: Any, name: str) -> list[float]:
    return [row[name] for row in run.state.log_history if name in row]


def canned(prompts: list[str], run: Any) -> dict[str, Any]:
    """A rollout_func: completions that depend on the row alone, log-probabilities of a sampler
    that differs a little from the trainer. Later rows are longer, so that processes differ."""
    tokenizer = run.processing_class
    drawn = torch.Generator().manual_seed(run.state.global_step)
    first = run.accelerator.process_index * len(prompts)
    rows = range(first, first + len(prompts))
    texts = [str(10 + 7 * i % 83)[: 1 + i % 2] * (1 + i // 4) for i in rows]
    ids = [[*tokenizer(t, add_special_tokens=False).input_ids, 2] for t in texts]
    return {
        "prompt_ids": [tokenizer(p).input_ids for p in prompts],
        "completion_ids": ids,
        "logprobs": [(-torch.rand(len(row), generator=drawn) - 1).tolist() for row in ids],
    }


class Gradients(TrainerCallback):
    """Keeps the gradients of each optimizer step, before the step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        named = given["model"].named_parameters()
        self.steps.append(
            {n.removeprefix("module."): whole(p.grad) for n, p in named if p.grad is not None}
        )


def whole(grad: torch.Tensor) -> torch.Tensor:
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).detach().clone()


class Watched(ProxpoTrainer):
    """Keeps the weights it started from, and every micro-batch with its rewards and groups."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.start = copy.deepcopy(self.accelerator.unwrap_model(self.model))
        self.parts: list[dict[str, torch.Tensor]] = []

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        whole, rows = self._rollouts["train"][0].whole, inputs[ROW]
        tensors = {n: x.clone() for n, x in inputs.items() if isinstance(x, torch.Tensor)}
        known = {"rewards": whole.rewards[rows], "group": whole.group[rows]}
        self.parts.append(tensors | known)
        return super()._compute_loss(model, inputs)
