"""`ProxpoTrainer`: TRL's GRPOTrainer, with the loss, the advantages and the gradient of a recipe.

TRL generates, scores, accumulates, shards, logs and saves. What is added: group logic before TRL
shuffles, the loss with the denominators of the whole optimizer step, a transform around forward
and backward, and the recipe's memory in the checkpoint.
"""

import copy
import sys
import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from proxpo.adapters.trl._fit import (
    check_engine,
    check_fit,
    cut,
    in_place,
    keeps_groups,
    made,
)
from proxpo.adapters.trl._memory import (
    read_memory,
    read_reference,
    write_memory,
    write_reference,
)
from proxpo.adapters.trl._metrics import Lengths, Watch, trl_metrics
from proxpo.adapters.trl._order import EpochOrder
from proxpo.adapters.trl._rollout import Rollout, early, prepared, window
from proxpo.adapters.trl._step import ROW, Step, asks_for_sums, in_all_groups, in_order, now, scored
from proxpo.adapters.trl._translate import IMAGES, fields_of, unscored, weighted
from proxpo.adapters.trl._vllm import mend_sync
from proxpo.compose import policy_loss
from proxpo.errors import NotFiniteError, ProxpoError
from proxpo.ops.metering import combined, joined
from proxpo.ops.streams import generator
from proxpo.ops.sums import over_microbatches, over_ranks
from proxpo.settings import Settings, at_length
from proxpo.stages.gradient import objective, per_response
from proxpo.stages.schedule import variants
from proxpo.types import (
    MOST_SKIPPED,
    AllSum,
    Batch,
    Clock,
    Context,
    Loss,
    Metrics,
    Recipe,
    States,
    local,
)


class _BeforeStep(TrainerCallback):
    """Ends the update of a transform, between the last backward and the optimizer's step."""

    def __init__(self, trainer: "ProxpoTrainer") -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer._end_update()


class ProxpoTrainer(GRPOTrainer):
    """GRPOTrainer with a recipe in place of `loss_type`; all other arguments are TRL's.

        ProxpoTrainer(model, reward_funcs, args, train_dataset, recipe="isopo")
        ProxpoTrainer(..., recipe="grpo", recipe_options={"clip_high": 0.28, "weights+": "tis"})

    recipe: the name of a method, or a Recipe. recipe_options: its options and stages, by name.
    Several updates per rollout (`num_iterations`, `steps_per_generation`), PEFT, vLLM, DDP, FSDP2
    and DeepSpeed work as in TRL. A run resumed from a checkpoint is the same run, in any epoch,
    if the checkpoint lies between two rollouts; in the midst of one TRL draws a new one. Options
    of GRPOConfig that a recipe decides are refused; one line at the start names their defaults that
    mean something else than the recipe. `kl`, `entropy` and `clip_ratio/*` are logged as by TRL,
    the recipe's metrics as `proxpo/...`.
    """

    args: GRPOConfig
    model: Any
    _buffered_inputs: Any
    _state: States
    _transform: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        *,
        recipe: str | Recipe = "isopo",
        recipe_options: Settings | None = None,
        **trl: Any,
    ) -> None:
        self.recipe = made(recipe, recipe_options)
        args = copy.copy(args) if args is not None else GRPOConfig(f"proxpo-{self.recipe.name}")
        self.recipe = at_length(self.recipe, args.max_completion_length)
        speaks = args.use_vllm or trl.get("rollout_func") is not None
        check_fit(self.recipe, args, reports_logp=speaks)
        self._needs = self.recipe.needs()
        self._watches = [Watch.of(one) for one in variants(self.recipe) or (self.recipe,)]
        self._variants = tuple(watch.recipe for watch in self._watches)
        self._lengths = Lengths()
        self._early = {name for one in self._variants for name in early(one)}
        gradient = self.recipe.gradient
        self._transform = None if gradient is None else gradient.apply()
        self._state = self.recipe.init_state()
        self._rollouts: dict[str, list[Rollout]] = {}
        self._current: Step | None = None
        self._block = ExitStack()
        line = in_place(self.recipe, args)
        if "ref_logp" in self._needs:
            args.beta = 1.0  # TRL's switch for reference log-probabilities; its loss does not run
        super().__init__(model, reward_funcs, args, train_dataset, **trl)
        self._skipped = 0
        parts = args.gradient_accumulation_steps * self.accelerator.num_processes
        for told in filter(None, (line, cut(self.recipe, parts))):
            if self.accelerator.is_main_process:
                print(f"proxpo: {told}", file=sys.stderr, flush=True)
        if self._transform is not None:
            check_engine(self.recipe, self)
            self.add_callback(_BeforeStep(self))
        if args.use_vllm:
            mend_sync(self.vllm_generation)

    # --- rollout: group logic where the groups are whole

    def _calculate_rewards(self, *given: Any, **named: Any) -> Any:
        self._scores = super()._calculate_rewards(*given, **named)
        return self._scores

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        mode = "train" if self.model.training else "eval"
        rows = len(output["prompt_ids"])
        first = self.accelerator.process_index * rows
        output[ROW] = torch.arange(first, first + rows, device=self.accelerator.device)
        fields = self._fields(output)
        size: Any = self.num_generations if mode == "train" else self.num_generations_eval
        rewards = weighted(self._scores, self.reward_weights)
        self._rollouts[mode] = [
            prepared(
                recipe,
                fields,
                rewards=rewards.to(torch.promote_types(self.model.dtype, torch.float32)),
                group_size=size,
                first=first,
                version=self.state.global_step,
                gather=self._gather,
                states=self._state,
                noise=generator(self.args.seed, "rollout", self.state.global_step),
                clock=self._clock(),
            )
            for recipe in self._variants
        ]
        for rollout in self._rollouts[mode]:
            for name, value in rollout.metrics.items():
                self._metrics[mode][f"proxpo/{name}"].append(float(value))
        return output

    def _fields(self, output: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The completions of this process as Batch fields, scored where TRL did not and we must."""
        old = output.get("old_per_token_logps")
        wanted = unscored(output) or "old_logp" in self._early or "prox_logp" in self._needs
        read = {}
        if "entropy" in self._early or (old is None and wanted):
            read = self._score(output)
        ends = [*self.eos_token_ids, self._tokenizer.pad_token_id]
        return fields_of(
            output,
            old=read.get("logp") if old is None else old,
            entropy=read.get("entropy") if "entropy" in self._early else None,
            ends=ends,
            proximal="prox_logp" in self._needs,
        )

    @torch.no_grad()
    def _score(self, output: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Log-probabilities of a generation batch, where TRL leaves them out, and entropies."""
        rows = self.args.per_device_train_batch_size
        quiet: Any = self.args.gradient_checkpointing_kwargs
        with disable_gradient_checkpointing(self.model, quiet):
            return self._forward(self.model, output, rows=rows)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return EpochOrder(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        held = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training and self._buffered_inputs is not held and keeps_groups(self.recipe):
            self._buffered_inputs = in_order(self._buffered_inputs)
            inputs = self._buffered_inputs[self._step % self._held]
        return inputs

    # --- update

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        try:
            with ExitStack() as self._block:  # a transform opened by the loss sees the backward
                loss = super().training_step(model, inputs, num_items_in_batch)
        except NotFiniteError:  # the gradient is not either, on any process: see `_end_update`
            if self.is_deepspeed_enabled:  # its engine has made the step already
                raise
        if self._step % self._per_rollout == 0:
            for recipe, rollout in zip(self._variants, self._rollouts["train"]):
                moved = recipe.update_state(self._state, rollout.whole, rollout.metrics)
                self._state = moved or self._state
        return loss

    def _end_update(self) -> None:
        """The transform after an update; one that is not finite is left out, without a trace."""
        optimizer: Any = self.optimizer
        trained = (p for group in optimizer.param_groups for p in group["params"])
        norm = get_total_norm([p.grad for p in trained if p.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        made = bool(torch.isfinite(norm))
        self._skipped = 0 if made else self._skipped + 1
        if not made:
            optimizer.zero_grad()  # without gradients an optimizer's step does nothing
            warnings.warn(
                f"step {self.state.global_step}: an update was left out, its gradient was not "
                "finite",
                stacklevel=2,
            )
        self._metrics["train"]["proxpo/skipped"].append(float(self._skipped))
        lengths = self._lengths.take()
        for name, value in lengths.items() if made else ():
            mean = self.accelerator.reduce(value, reduction="mean")
            self._metrics["train"][f"proxpo/{name}"].append(mean.item())
        self._transform.step(skipped=not made)
        if self._skipped >= MOST_SKIPPED:
            raise ProxpoError(
                f"step {self.state.global_step}: the gradient was not finite in {MOST_SKIPPED} "
                "updates in a row; lower learning_rate or set max_grad_norm"
            )

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        mode = "train" if self.model.training else "eval"
        step = self._step_of(mode, inputs)
        batch = step.window.part(inputs[ROW])
        lag = self.state.global_step - step.window.rollout.version
        batch = batch.replace(lag=torch.full_like(batch.mask, lag, dtype=torch.long))
        if self._transform is None or not torch.is_grad_enabled():
            found = self._forward(model, inputs, aux=self.aux_loss_enabled, entropy=True)
            aux = found.pop("aux_loss", None)
            batch = now(batch, found)
            value, metrics = self._loss(step, step.recipe, batch)
            value = value * self.accelerator.num_processes  # engines average over processes
            if aux is not None:
                parts = self.current_gradient_accumulation_steps if mode == "train" else 1
                value = value + self.router_aux_loss_coef * aux / parts
                mean = self.accelerator.gather_for_metrics(aux.detach()).mean()
                self._metrics[mode]["aux_loss"].append(mean.item())
        else:
            value, metrics, batch = self._transformed(model, inputs, step, batch)
        self._note(mode, step, metrics, batch)
        return value

    def _transformed(
        self, model: nn.Module, inputs: dict[str, Any], step: Step, batch: Batch
    ) -> tuple[torch.Tensor, Metrics, Batch]:
        """The loss's value, with the objective of the gradient transform behind it."""
        recipe, processes = step.recipe, self.accelerator.num_processes
        bare = recipe.replace(regularisers=(), value=None)
        extra, metrics = torch.zeros((), device=batch.mask.device), {}
        if recipe.regularisers:  # terms without an advantage: a backward of their own
            fresh = now(batch, self._forward(model, inputs))
            whole = self._loss(step, recipe, fresh)
            extra, metrics = whole.value - self._loss(step, bare, fresh).value, whole.metrics
            self._backward(processes * extra)
        ctx = self._context(step, bare)
        attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).bool()
        number = torch.arange(len(attended), device=attended.device)[:, None]
        self._block.enter_context(
            self._transform.applied(
                self.accelerator.unwrap_model(model),
                sequences=torch.where(attended, number, -1),
                advantages=processes * per_response(recipe, batch),  # engines average
                groups=batch.group,
                observe=self._lengths,
            )
        )
        batch = now(batch, self._forward(model, inputs, entropy=True))
        split = objective(recipe, batch, ctx)
        descended = -(split.weights * batch.logp).sum()
        value = processes * (split.loss.value + extra).detach()
        return value + descended - descended.detach(), metrics | split.loss.metrics, batch

    def _backward(self, value: torch.Tensor) -> None:
        """Gradients that TRL's backward, which follows, will be added to."""
        if self.is_deepspeed_enabled:  # its engine would make the optimizer step as well
            engine = self.accelerator.deepspeed_engine_wrapped
            engine.backward(value, sync_gradients=False, scale_wrt_gas=False)
        else:
            self.accelerator.backward(value)

    def _loss(self, step: Step, recipe: Recipe, batch: Batch) -> Loss:
        return policy_loss(recipe, batch, self._context(step, recipe))

    def _context(self, step: Step, recipe: Recipe) -> Context:
        """Context of a recipe's loss on the micro-batch in turn."""
        place = (
            self.state.global_step,
            self._step % self.args.gradient_accumulation_steps,
            self.accelerator.process_index,
        )
        ctx = Context(
            denominators=step.window.denominators, states=self._state, clock=self._clock()
        )
        whole = bool(recipe.regularisers)  # or the recipe without them, which asks for fewer sums
        if whole not in step.sums:
            step.sums[whole] = self._sums(step, recipe, ctx)
        noise = generator(self.args.seed, "loss", *place)
        return replace(ctx, all_sum=step.sums[whole], generator=noise)

    def _clock(self) -> Clock:
        """TRL counts optimizer steps; to a recipe that follows the run they are its steps."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return Clock(
            step=self.state.global_step,
            steps=self.state.max_steps or None,
            learning_rate=groups[0]["lr"] if groups else None,
        )

    def _sums(self, step: Step, recipe: Recipe, ctx: Context) -> AllSum:
        """Statistics over all processes, and over the micro-batches if the recipe asks for any."""
        ranks = over_ranks() if self.accelerator.num_processes > 1 else local
        ranks = ranks if keeps_groups(recipe) else in_all_groups(ranks)

        def run(piece: Batch, *, all_sum: AllSum) -> Loss:
            return policy_loss(recipe, piece, replace(ctx, all_sum=all_sum))

        if len(step.inputs) == 1 or not asks_for_sums(run, step, apart=not keeps_groups(recipe)):
            return ranks
        with torch.no_grad():
            pieces = [
                now(step.window.part(one[ROW]), self._forward(step.model, one))
                for one in step.inputs
            ]
        return over_microbatches(run, pieces, ranks=ranks)

    def _step_of(self, mode: str, inputs: dict[str, Any]) -> Step:
        """The optimizer step this micro-batch belongs to; every process enters it together."""
        if mode == "eval":
            return self._open(self.model, 0, mode, [inputs])
        parts = self.args.gradient_accumulation_steps
        turn, place = divmod(self._step % self._per_rollout, self._held)
        if self._current is None or place % parts == 0:
            variant = turn * len(self._variants) // self.num_iterations
            held = self._buffered_inputs[place - place % parts :][:parts]
            self._current = self._open(self.model_wrapped, variant, mode, held)
        return self._current

    def _open(
        self, model: nn.Module, variant: int, mode: str, inputs: list[dict[str, Any]]
    ) -> Step:
        rows = self._gather(torch.cat([one[ROW] for one in inputs]))
        rollout = self._rollouts[mode][variant]
        return Step(
            recipe=self._variants[variant],
            window=window(rollout, rows),
            inputs=inputs,
            model=model,
        )

    @property
    def _held(self) -> int:
        """Micro-batches of a rollout."""
        held: Any = self.args.steps_per_generation
        return held

    @property
    def _per_rollout(self) -> int:
        """Micro-batches from one rollout to the next."""
        return self._held * self.num_iterations

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        padded = self.accelerator.pad_across_processes(x, dim=1) if x.dim() > 1 else x
        return self.accelerator.gather(padded)

    # --- log-probabilities

    def _forward(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        *,
        aux: bool = False,
        entropy: bool = False,
        rows: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Numbers of the current weights for a micro-batch, by Batch name."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logp, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            ids,
            attended,
            inputs["completion_ids"].shape[1],
            batch_size=rows,
            compute_entropy=entropy or self._transform is None or "entropy" in self._needs,
            compute_aux_loss=aux,
            **{name: inputs[name] for name in IMAGES if name in inputs},
        )
        found = {"logp": logp, "entropy": entropies, "aux_loss": aux_loss}
        return {name: value for name, value in found.items() if value is not None}

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """TRL's; under a transform ours, because TRL's head is a function the transform cannot see.

        Old and reference log-probabilities then come from the same code as the current ones.
        """
        if self._transform is None:
            return super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **images,
            )
        how: Any = {"temperature": self.temperature, "entropy": compute_entropy}
        with self.accelerator.autocast():
            logp, entropy = scored(
                model, input_ids, attention_mask, logits_to_keep, rows=batch_size, **how
            )
        return logp, entropy, None

    # --- metrics and memory

    def _note(self, mode: str, step: Step, metrics: Metrics, batch: Batch) -> None:
        """TRL's metrics of the micro-batch; ours of the optimizer step, when it is complete."""
        watch = next(watch for watch in self._watches if watch.recipe is step.recipe)
        total = partial(self.accelerator.reduce, reduction="sum")
        known = trl_metrics(watch, batch, metrics, total=total, gather=self.accelerator.gather)
        for name, number in known.items():
            self._metrics[mode][name].append(number)
        share = batch.mask.sum() / step.window.denominators.tokens.clamp(min=1)
        step.seen = combined(step.recipe, step.seen, metrics, share=share)
        step.done += 1
        if step.done < len(step.inputs) or not step.seen:
            return
        table = self.accelerator.gather(torch.stack(list(step.seen.values()))[None]).cpu()
        for name, column in zip(step.seen, table.unbind(dim=1)):
            value = float(joined(name, column.unbind()))
            self._metrics[mode][f"proxpo/{name}"].append(value)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.should_save:  # first, so that a checkpoint TRL has finished is never without
            step = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder = Path(self._get_output_dir(trial=trial)) / step
            folder.mkdir(parents=True, exist_ok=True)
            write_memory(folder, self.recipe, self._state, self._transform)
            if self.args.sync_ref_model and not self._shards_reference():
                write_reference(folder, self.accelerator.unwrap_model(self.ref_model))
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._state = read_memory(Path(checkpoint), self.recipe, self._transform)
            if self.args.sync_ref_model:
                read_reference(Path(checkpoint), self.accelerator.unwrap_model(self.ref_model))

    def _shards_reference(self) -> bool:
        """True if no process holds the whole reference model."""
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        return self.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)


__all__ = ["ProxpoTrainer"]
