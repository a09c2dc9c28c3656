"""verl's FSDP engine under a gradient transform: ISOPO, ISOPO-NTK and their like.

    VERL_ENGINE_VENDOR=proxpo, actor_rollout_ref.actor.strategy=fsdp2, loss_mode=proxpo_isopo

A micro-batch runs forward and backward inside the transform's block. Terms without an advantage
(verl's KL and entropy losses, a recipe's regularisers) get an ordinary pass of their own before it.
Losses without a transform run as in verl, and may read fields that verl does not hand to losses.

Under Ulysses every rank of a sequence-parallel group runs a slice of the packed row; lengths and
kernels are then those of whole sequences (`token_group` of `Transform.applied`).
"""

import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric import AggregationType, Metric
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.ulysses import gather_outputs_and_unpad, ulysses_pad_and_slice_inputs
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from proxpo.adapters.verl._checkpoint import load_state, save_state
from proxpo.adapters.verl._environment import ENGINE_ARGUMENTS, VENDOR, check_signature
from proxpo.adapters.verl._losses import (
    ActorLoss,
    EngineInputs,
    check_average,
    engine_inputs,
    loss_batch,
    recipe_for,
    save_due_batch,
    verl_metrics,
)
from proxpo.adapters.verl._recipes import ENGINE_FIELDS, missing_field, needed_fields, slug_of
from proxpo.backward import backward_pass, policy_term
from proxpo.errors import NotFiniteError, ProxpoError
from proxpo.gradients import Transform
from proxpo.ops.shapes import Int, Tensor
from proxpo.types import Batch, Recipe

BACKENDS = ["fsdp", "fsdp2"]
REFUSED_BACKENDS = ["automodel", "megatron", "torchtitan", "veomni"]
DEVICES = ["cpu", "cuda", "npu"]
GATHER_ARGUMENTS = ("x", "gather_dim", "unpad_dim", "padding_size", "grad_scaler", "group")


def register_engine() -> None:
    """Registers the engine under the vendor `proxpo`, and a refusal of all other backends."""
    check_signature(FSDPEngineWithLMHead.forward_step, ENGINE_ARGUMENTS)
    check_signature(ppo_loss, ("config", "model_output", "data", "dp_group"))
    check_signature(gather_outputs_and_unpad, GATHER_ARGUMENTS)
    known = EngineRegistry._engines.get("language_model", {})
    if ("cuda", VENDOR) in known.get("fsdp2", {}):
        return
    EngineRegistry.register("language_model", BACKENDS, DEVICES, VENDOR)(ProxpoEngine)
    EngineRegistry.register("language_model", REFUSED_BACKENDS, DEVICES, VENDOR)(NoEngine)


class NoEngine(BaseEngine):
    """Refuses the backends that hide the activations a gradient transform needs."""

    def __init__(self, model_config: Any, engine_config: Any, *rest: Any, **named: Any) -> None:
        raise ProxpoError(
            f"verl: proxpo's gradient transforms need actor.strategy=fsdp2, got "
            f"'{engine_config.strategy}'; unset VERL_ENGINE_VENDOR to run a loss mode without one"
        )


class ProxpoEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine whose backward pass may go through a gradient transform."""

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self.transform: Transform | None = None
        self._saved: dict[str, Any] | None = None

    def forward_step(
        self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        recipe = None if forward_only else recipe_of(loss_function)
        if recipe is None or loss_function is None:
            return super().forward_step(micro_batch, loss_function, forward_only)
        if recipe.gradient is None:
            loss = functools.partial(_with_engine_inputs, recipe, loss_function, False)
            return super().forward_step(micro_batch, loss, forward_only)
        return self._transformed(recipe, micro_batch, loss_function)

    def _transformed(
        self, recipe: Recipe, micro_batch: Any, loss_function: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Forward and backward of a micro-batch; the loss returned has no gradient left to give."""
        config, micro_batch = loss_function.keywords["config"], micro_batch.to(get_device_id())
        metrics: dict[str, Any] = {}
        rest = 0.0
        if recipe.regularisers or config.use_kl_loss or config.entropy_coeff:
            rest_loss = functools.partial(_with_engine_inputs, recipe, loss_function, True)
            loss, output = super().forward_step(micro_batch, rest_loss, False)
            loss.backward()
            metrics, rest = output["metrics"], output["loss"]
        if self.transform is None:
            self.transform = self._make_transform(recipe)
        actor, batch = policy_term_of(recipe, config, micro_batch)
        slices = self.ulysses_sequence_parallel_size
        outputs: list[dict[str, Any]] = []

        def forward() -> dict[str, Tensor]:
            fields: dict[str, Tensor] = {}
            keep = functools.partial(_keep_fields, recipe, config, batch, fields)
            outputs.append(super(ProxpoEngine, self).forward_step(micro_batch, keep, False)[1])
            return fields

        applied = functools.partial(
            self.transform.applied,
            self.module,
            sequences=self._sequences(micro_batch),
            token_group=self.ulysses_parallel_group,
        )
        # verl averages gradients over all ranks. A transform is linear in the advantages alone.
        try:
            with backward_pass(
                actor.recipe,
                batch,
                actor.ctx,
                forward=forward,
                applied=applied,
                ranks=actor.ranks * slices,
            ) as opened:
                # verl's gather over slices multiplies the gradient by their number on the way
                # back, which would enter the lengths.
                (opened.objective / slices).backward()
        except NotFiniteError as error:  # its gradient is not finite: verl leaves the update out
            warnings.warn(f"{error}; verl skips the update", stacklevel=2)
        save_due_batch(config, batch.replace(**opened.fields))
        value = opened.loss.value.detach() * actor.ranks
        means = verl_metrics(opened.loss, batch.replace(**opened.fields))
        metrics |= outputs[-1]["metrics"]
        metrics |= Metric.from_dict(means, aggregation=AggregationType.MEAN)
        metrics["actor/pg_loss"] = Metric(value=value, aggregation=AggregationType.SUM)
        output = {**outputs[-1], "metrics": metrics, "loss": rest + float(value)}
        return torch.tensor(output["loss"], requires_grad=True), output

    def _sequences(self, micro_batch: Any) -> Int[Tensor, "..."]:
        """The sequence of every position this rank sees, cut as verl cuts its inputs."""
        packed = tu.get_non_tensor_data(micro_batch, "use_remove_padding", True)
        row = sequence_numbers(
            micro_batch["input_ids"], packed=packed, pad=self._get_packed_pad_size
        )
        slices = self.ulysses_sequence_parallel_size
        if slices == 1:
            return row
        return ulysses_pad_and_slice_inputs(row, sp_size=slices, pad_value=-1)[0]

    def optimizer_step(self) -> float:
        norm = super().optimizer_step()
        if self.transform is not None:
            self.transform.step(skipped=not math.isfinite(norm))  # verl makes no step then
        return norm

    def save_checkpoint(self, local_path: str, *rest: Any, **named: Any) -> None:
        super().save_checkpoint(local_path, *rest, **named)
        if self.transform is not None and self.rank == 0:
            save_state(Path(local_path), self.transform.state_dict())
        dist.barrier()

    def load_checkpoint(self, local_path: str, *rest: Any, **named: Any) -> None:
        self._saved = load_state(Path(local_path)) if local_path else None
        super().load_checkpoint(local_path, *rest, **named)
        if self.transform is not None and self._saved is not None:
            self.transform.load_state_dict(self._saved)

    def _make_transform(self, recipe: Recipe) -> Transform:
        assert recipe.gradient is not None
        check_engine_config(recipe, self.model_config, self.engine_config)
        transform: Transform = recipe.gradient.apply()
        if transform.from_head:
            raise ProxpoError(
                "verl: isopo with scope=head needs proxpo's log-probabilities, and verl computes "
                "logits: take scope=layer"
            )
        if self.use_ulysses_sp and not transform.spreads:
            raise ProxpoError(
                f"verl: gradient={recipe.gradient.name} needs ulysses_sequence_parallel_size=1"
            )
        if self._saved is not None:
            transform.load_state_dict(self._saved)
        return transform


def check_engine_config(recipe: Recipe, model_config: Any, engine_config: Any) -> None:
    """Refuses every setting under which per-sequence gradients would be wrong.

    The driver knows all but the model's own config.
    """
    gradient = recipe.gradient and recipe.gradient.name
    if engine_config.strategy != "fsdp2":
        raise ProxpoError(
            f"verl: gradient={gradient} needs actor.strategy=fsdp2, got '{engine_config.strategy}'"
        )
    spread = engine_config.ulysses_sequence_parallel_size > 1
    model = getattr(model_config, "hf_config", None)
    attention = getattr(model, "_attn_implementation", "")
    reasons = {
        "ulysses_sequence_parallel_size=1 for a model with vision, which verl cuts inside": (
            spread and hasattr(model, "vision_config")
        ),
        "flash attention under Ulysses, since verl exchanges positions for heads inside it": (
            spread and attention in ("eager", "sdpa", "flex_attention")
        ),
        "model.use_fused_kernels=False, since a fused head hides its weight": bool(
            model_config.use_fused_kernels
        ),
        "fsdp_config.offload_policy=False, since activations and parameters must share a device": (
            bool(engine_config.offload_policy)
        ),
        "a bfloat16 or float32 param_dtype, since a loss scale would enter the lengths": (
            _param_dtype(engine_config) == torch.float16
        ),
    }
    for wanted, broken in reasons.items():
        if broken:
            raise ProxpoError(f"verl: gradient={gradient} needs {wanted}")


def _param_dtype(engine_config: Any) -> torch.dtype:
    return PrecisionType.to_dtype((engine_config.mixed_precision or {}).get("param_dtype", "bf16"))


def recipe_of(loss_function: Callable[..., Any] | None) -> Recipe | None:
    """The recipe behind verl's loss function; None if it is not one of proxpo's."""
    config = getattr(loss_function, "keywords", {}).get("config")
    slug = slug_of(str(config.policy_loss.get("loss_mode", ""))) if config is not None else None
    if slug is None:
        return None
    recipe = recipe_for(slug, config)
    if recipe.gradient is not None:
        check_objective(recipe, config, loss_function)
    return recipe


def check_objective(recipe: Recipe, config: Any, loss_function: Any) -> None:
    """Refuses an objective whose policy term is not the recipe's alone."""
    if getattr(loss_function, "func", None) is not ppo_loss:
        raise ProxpoError(f"verl: {recipe.name} cannot be mixed with distillation")
    check_average(recipe, config.loss_agg_mode)


def sequence_numbers(
    input_ids: Any, *, packed: bool, pad: Callable[[int], int] = lambda length: 0
) -> Int[Tensor, "..."]:
    """The number of the sequence at every position the model sees, -1 for padding.

    input_ids: verl's jagged nested tensor, cut at its offsets.
    packed: all sequences in one row, with `pad(length)` positions behind; else a row for each.
    """
    lengths = input_ids.offsets().diff()
    numbers = torch.arange(len(lengths), device=lengths.device)
    if packed:
        row = numbers.repeat_interleave(lengths)[None]
        return torch.nn.functional.pad(row, (0, pad(row.shape[1])), value=-1)
    columns = torch.arange(int(lengths.max()), device=lengths.device)
    return torch.where(columns < lengths[:, None], numbers[:, None], -1)


def policy_term_of(recipe: Recipe, config: Any, data: Any) -> tuple[ActorLoss, Batch]:
    """The policy term of a recipe under verl's actor config, and a micro-batch before its forward.

    The log-probabilities of the batch are the old ones until the forward pass has brought others.
    """
    names = ["response_mask", "old_log_probs", "advantages"]
    names += ["rollout_is_weights"] if "rollout_is_weights" in data else []
    tensors = data.select(*names).to_padded_tensor()
    mask, old, advantages = (tensors[name] for name in names[:3])
    batch = loss_batch(recipe, old, old, advantages, mask, fields_of_data(recipe, data))
    for name in ("dp_size", "batch_num_tokens", "global_batch_size"):
        config.global_batch_info[name] = data[name]
    config.global_batch_info["loss_scale_factor"] = config.loss_scale_factor
    weights = tensors.get("rollout_is_weights")
    term = policy_term(recipe)
    return ActorLoss.of(term, batch.mask, config.loss_agg_mode, config, weights), batch


def _with_engine_inputs(
    recipe: Recipe,
    loss_function: Callable[..., Any],
    rest: bool,
    model_output: dict[str, Any],
    data: Any,
    dp_group: Any = None,
) -> tuple[Tensor, dict[str, Any]]:
    """verl's own loss function, whose loss mode gets the engine's fields of the micro-batch."""
    fields = fields_of_data(recipe, data) | fields_of_output(recipe, model_output, data)
    with engine_inputs(EngineInputs(fields=fields, rest=rest)):
        return loss_function(model_output=model_output, data=data, dp_group=dp_group)


def _keep_fields(
    recipe: Recipe,
    config: Any,
    batch: Batch,
    fields: dict[str, Tensor],
    model_output: dict[str, Any],
    data: Any,
    dp_group: Any = None,
) -> tuple[Tensor, dict[str, Any]]:
    """A loss function for verl that computes none, and keeps the fields of the forward pass.

    The entropy that verl was asked for is reported as by verl's own loss.
    """
    logp = no_padding_2_padding(model_output["log_probs"], data)
    present = {"logp": logp, **fields_of_output(recipe, model_output, data)}
    clean = batch.replace(**present).clean(*present)
    fields.update({name: getattr(clean, name) for name in present})
    if model_output.get("entropy") is None:
        return torch.zeros(()), {}
    entropy = no_padding_2_padding(model_output["entropy"].detach(), data)
    mode, info = config.loss_agg_mode, config.global_batch_info
    value = agg_loss(loss_mat=entropy, loss_mask=batch.mask, loss_agg_mode=mode, **info)
    metric = Metric(value=value, aggregation=AggregationType.SUM)
    return torch.zeros(()), {"actor/entropy_loss": metric}


def fields_of_data(recipe: Recipe, data: Any) -> dict[str, Tensor]:
    """Batch fields that the recipe reads beyond verl's arguments, from verl's data."""
    fields: dict[str, Tensor] = {}
    for name in needed_fields(recipe):
        key = ENGINE_FIELDS[name].key if name in ENGINE_FIELDS else ""
        if key and key not in data:
            raise missing_field(recipe, name)
        if key:
            fields[name] = data.select(key).to_padded_tensor()[key]
    return fields


def fields_of_output(recipe: Recipe, model_output: dict[str, Any], data: Any) -> dict[str, Tensor]:
    """The entropy, if the recipe reads it."""
    if "entropy" not in needed_fields(recipe):
        return {}
    if model_output.get("entropy") is None:
        raise missing_field(recipe, "entropy")
    return {"entropy": no_padding_2_padding(model_output["entropy"], data)}


__all__ = ["NoEngine", "ProxpoEngine", "check_engine_config", "register_engine", "sequence_numbers"]
