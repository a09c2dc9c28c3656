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
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.ulysses import gather_outputs_and_unpad, ulysses_pad_and_slice_inputs
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from proxpo.adapters.verl._host import ENGINE_ARGUMENTS, VENDOR, check_signature
from proxpo.adapters.verl._losses import (
    AVERAGES,
    Offer,
    Step,
    full_precision,
    make_batch,
    offering,
    recipe_for,
    report,
)
from proxpo.adapters.verl._recipes import slug_of
from proxpo.adapters.verl._state import load_state, save_state
from proxpo.backward import advantages_per_response, objective
from proxpo.errors import NotFiniteError, ProxpoError
from proxpo.gradients import Transform
from proxpo.ops.shapes import Int, Tensor
from proxpo.types import Batch, Context, Recipe

OURS = ["fsdp", "fsdp2"]
OTHERS = ["automodel", "megatron", "torchtitan", "veomni"]
DEVICES = ["cpu", "cuda", "npu"]
OFFERED = {"ref_logp": "ref_log_prob", "rollout_logp": "rollout_log_probs"}
GATHER_ARGUMENTS = ("x", "gather_dim", "unpad_dim", "padding_size", "grad_scaler", "group")
SETTINGS = {
    "ref_logp": "actor_rollout_ref.actor.use_kl_loss=True and kl_loss_coef=0",
    "rollout_logp": "actor_rollout_ref.rollout.calculate_log_probs=True",
    "entropy": "actor_rollout_ref.actor.calculate_entropy=True",
}


def register() -> None:
    """Offer the engine to verl under the vendor `proxpo`, and refuse the others under that name."""
    check_signature(FSDPEngineWithLMHead.forward_step, ENGINE_ARGUMENTS)
    check_signature(ppo_loss, ("config", "model_output", "data", "dp_group"))
    check_signature(gather_outputs_and_unpad, GATHER_ARGUMENTS)
    known = EngineRegistry._engines.get("language_model", {})
    if ("cuda", VENDOR) in known.get("fsdp2", {}):
        return
    EngineRegistry.register("language_model", OURS, DEVICES, VENDOR)(ProxpoEngine)
    EngineRegistry.register("language_model", OTHERS, DEVICES, VENDOR)(NoEngine)


class NoEngine(BaseEngine):
    """Stands for the backends that hide the activations a gradient transform needs."""

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
        if not engine_config.forward_only:
            refuse(model_config, engine_config)
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
            offered = functools.partial(_offered, recipe, loss_function, False)
            return super().forward_step(micro_batch, offered, forward_only)
        return self._transformed(recipe, micro_batch, loss_function)

    def _transformed(
        self, recipe: Recipe, micro_batch: Any, loss_function: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Forward and backward of a micro-batch; what is returned has no gradient left to give."""
        config = loss_function.keywords["config"]
        metrics: dict[str, Any] = {}
        total = 0.0
        if recipe.regularisers or config.use_kl_loss or config.entropy_coeff:
            rest = functools.partial(_offered, recipe, loss_function, True)
            loss, output = super().forward_step(micro_batch, rest, False)
            loss.backward()
            metrics, total = output["metrics"], output["loss"]
        if self.transform is None:
            self.transform = self._make_transform(recipe)
        # verl averages gradients over all ranks. A transform is linear in the advantages alone.
        slices = self.ulysses_sequence_parallel_size
        advantages = rows_of(recipe, micro_batch) * (int(micro_batch["dp_size"]) * slices)
        policy = functools.partial(_policy, recipe, config, slices)
        try:
            with self.transform.applied(
                self.module,
                sequences=self._sequences(micro_batch),
                advantages=advantages,
                token_group=self.ulysses_parallel_group,
            ):
                loss, output = super().forward_step(micro_batch, policy, False)
                loss.backward()
        except NotFiniteError as error:  # its gradient is not finite: verl leaves the update out
            warnings.warn(f"{error}; verl skips the update", stacklevel=2)
        value = output["metrics"]["actor/pg_loss"].values[-1]
        output["metrics"] = {**metrics, **output["metrics"]}
        output["loss"] = total + float(value)
        return torch.tensor(output["loss"], requires_grad=True), output

    def _sequences(self, micro_batch: Any) -> Int[Tensor, "..."]:
        """The sequence of every position this rank sees, cut as verl cuts its inputs."""
        packed = tu.get_non_tensor_data(micro_batch, "use_remove_padding", True)
        row = numbered(micro_batch["input_ids"], packed=packed, pad=self._get_packed_pad_size)
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
        made: Transform = recipe.gradient.apply()
        if self.use_ulysses_sp and not made.spreads:
            raise ProxpoError(
                f"verl: gradient={recipe.gradient.name} needs ulysses_sequence_parallel_size=1"
            )
        if self._saved is not None:
            made.load_state_dict(self._saved)
        return made


def refuse(model_config: Any, engine_config: Any) -> None:
    """One line for every setting under which per-sequence gradients would be wrong."""
    spread, model = engine_config.ulysses_sequence_parallel_size > 1, model_config.hf_config
    reasons = {
        "actor.strategy=fsdp2, since FSDP1 flattens parameters": engine_config.strategy == "fsdp",
        "ulysses_sequence_parallel_size=1 for a model with vision, which verl cuts inside": (
            spread and hasattr(model, "vision_config")
        ),
        "flash attention under Ulysses, since verl exchanges positions for heads inside it": (
            spread and model._attn_implementation in ("eager", "sdpa", "flex_attention")
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
            raise ProxpoError(f"verl: proxpo's engine needs {wanted}")


def _param_dtype(engine_config: Any) -> torch.dtype:
    return PrecisionType.to_dtype((engine_config.mixed_precision or {}).get("param_dtype", "bf16"))


def recipe_of(loss_function: Callable[..., Any] | None) -> Recipe | None:
    """The recipe behind verl's loss function; None if it is not one of ours."""
    config = getattr(loss_function, "keywords", {}).get("config")
    slug = slug_of(str(config.policy_loss.get("loss_mode", ""))) if config is not None else None
    if slug is None:
        return None
    recipe = recipe_for(slug, config)
    if recipe.gradient is not None:
        check_objective(recipe, config, loss_function)
    return recipe


def check_objective(recipe: Recipe, config: Any, loss_function: Any) -> None:
    """A transform's lengths carry the scale of the objective, so the average must be its own."""
    if getattr(loss_function, "func", None) is not ppo_loss:
        raise ProxpoError(f"verl: {recipe.name} cannot be mixed with distillation")
    if AVERAGES.get(config.loss_agg_mode) != recipe.aggregate.name:
        own = {name: mode for mode, name in AVERAGES.items()}.get(recipe.aggregate.name)
        raise ProxpoError(
            f"verl: {recipe.name} with gradient={recipe.gradient and recipe.gradient.name} needs "
            f"actor.loss_agg_mode={own}, got '{config.loss_agg_mode}'"
        )


def numbered(
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


def rows_of(recipe: Recipe, micro_batch: Any) -> Tensor:
    """The advantage of each response of a micro-batch."""
    data = micro_batch.select("response_mask", "advantages").to_padded_tensor()
    advantages, mask = data["advantages"], data["response_mask"].bool()
    return advantages_per_response(
        recipe, Batch(logp=advantages, mask=mask, advantages=advantages).clean()
    )


def _offered(
    recipe: Recipe,
    loss_function: Callable[..., Any],
    rest: bool,
    model_output: dict[str, Any],
    data: Any,
    dp_group: Any = None,
) -> tuple[Tensor, dict[str, Any]]:
    """verl's own loss function, with the fields of the micro-batch at hand."""
    with offering(Offer(fields=fields_of(recipe, model_output, data), rest=rest)):
        return loss_function(model_output=model_output, data=data, dp_group=dp_group)


def _policy(
    recipe: Recipe,
    config: Any,
    slices: int,
    model_output: dict[str, Any],
    data: Any,
    dp_group: Any = None,
) -> tuple[Tensor, dict[str, Any]]:
    """-Σ u·log π, for the transform to turn into the method's gradient; the loss is reported.

    verl's gather over `slices` multiplies the gradient by their number on the way back, which
    would enter the lengths; hence the division.
    """
    names = ["response_mask", "old_log_probs", "advantages"]
    names += ["rollout_is_weights"] if "rollout_is_weights" in data else []
    given = data.select(*names).to_padded_tensor()
    log_prob = no_padding_2_padding(model_output["log_probs"], data)
    old, advantages, mask = (given[x] for x in ("old_log_probs", "advantages", "response_mask"))
    fields = fields_of(recipe, model_output, data)
    batch = make_batch(recipe, old, log_prob, advantages, mask, fields)
    for name in ("dp_size", "batch_num_tokens", "global_batch_size"):
        config.global_batch_info[name] = data[name]
    config.global_batch_info["loss_scale_factor"] = config.loss_scale_factor
    step = Step.of(recipe, batch, config.loss_agg_mode, config, given.get("rollout_is_weights"))
    with full_precision(log_prob):
        ctx = Context(denominators=step.counts, states={}, all_sum=step.all_sum)
        split = objective(step.recipe, batch, ctx)
    seen = Metric.from_dict(report(split.loss, batch), aggregation=AggregationType.MEAN)
    value = split.loss.value.detach() * step.ranks
    seen["actor/pg_loss"] = Metric(value=value, aggregation=AggregationType.SUM)
    return -(split.weights * batch.logp).sum() / slices, seen


def fields_of(recipe: Recipe, model_output: dict[str, Any], data: Any) -> dict[str, Tensor]:
    """What the recipe reads beyond verl's arguments, or the setting that makes verl compute it."""
    needed = {name for _, stage in recipe.stages() for name in stage.needs}
    if "prox_logp" in needed:
        needed.add("rollout_logp")
    found: dict[str, Tensor] = {}
    for ours, theirs in OFFERED.items():
        if ours in needed and theirs in data:
            found[ours] = data.select(theirs).to_padded_tensor()[theirs]
    if "entropy" in needed and model_output.get("entropy") is not None:
        found["entropy"] = no_padding_2_padding(model_output["entropy"], data)
    for name, setting in SETTINGS.items():
        if name in needed and name not in found:
            raise ProxpoError(f"verl: {recipe.name} reads '{name}': set {setting}")
    return found


__all__ = ["NoEngine", "ProxpoEngine", "numbered", "refuse", "register"]
