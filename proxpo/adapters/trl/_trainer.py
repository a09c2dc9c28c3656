"""`ProxpoTrainer`: TRL's GRPOTrainer, with the loss, the advantages and the gradient of a recipe.

TRL generates, scores, accumulates, shards, logs and saves. What is added: group logic before TRL
shuffles, the loss with the denominators of the whole optimizer step, a transform around forward
and backward, and the recipe's memory in the checkpoint.
"""

import copy
import sys
import warnings
from collections.abc import Callable
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
from trl import GRPOConfig

from proxpo.adapters.trl._arguments import replaced_defaults
from proxpo.adapters.trl._as_trl import as_trl, counts_generation
from proxpo.adapters.trl._checkpoint import (
    paper_of,
    read_memory,
    read_reference,
    write_memory,
    write_reference,
)
from proxpo.adapters.trl._generation_batch import (
    GenerationBatch,
    batch_fields,
    fields_before_update,
    has_unscored_tokens,
    prepared,
    weighted_rewards,
)
from proxpo.adapters.trl._metrics import ClipRecorder, gradient_lengths, trl_metrics
from proxpo.adapters.trl._optimizer_step import (
    ROW,
    TRL_ADVANTAGES,
    OptimizerStep,
    counts_of_step,
    groups_over_processes,
    in_generation_order,
)
from proxpo.adapters.trl._passes import PolicyPasses
from proxpo.adapters.trl._refusals import (
    check_advantages,
    check_engine,
    check_evaluated,
    check_recipe,
    check_updates,
    microbatch_dependence,
    needs_whole_groups,
    resolve_recipe,
    warn_of_dropout,
)
from proxpo.adapters.trl._sampler import EpochSampler
from proxpo.adapters.trl._vllm import mend_sync
from proxpo.backward import backward_pass, policy_term, sums_over_step
from proxpo.batch_file import BatchRecorder, save_step
from proxpo.errors import NotFiniteError, ProxpoError, resolve
from proxpo.ops.masked import masked_mean
from proxpo.ops.metering import combined, joined, logged, share_of_step
from proxpo.ops.shapes import Tensor
from proxpo.ops.streams import generator
from proxpo.ops.sums import over_ranks
from proxpo.settings import Settings, at_length
from proxpo.stages.schedule import variants
from proxpo.types import (
    MOST_SKIPPED,
    AllSum,
    Batch,
    Clock,
    Context,
    Metrics,
    Reach,
    Recipe,
    States,
    local,
)


class _RunEvents(TrainerCallback):
    """Calls the trainer where a run begins, and between the last backward and the optimizer."""

    def __init__(self, trainer: "ProxpoTrainer") -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer._begin_run()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer._end_update()


class ProxpoTrainer(PolicyPasses):
    """GRPOTrainer with a recipe in place of `loss_type`; all other arguments are TRL's.

        ProxpoTrainer(model, reward_funcs, args, train_dataset, recipe="isopo")
        ProxpoTrainer(..., recipe="grpo", recipe_options={"clip_high": 0.28, "weights+": "tis"})

    recipe: the name of a method, or a Recipe
    recipe_options: its options and stages, by name
    batch_every: steps between batches saved in OUTPUT_DIR/batches, for `proxpo inspect --run
        OUTPUT_DIR`; a batch is a whole rollout, saved with the number of its last step; 0: none
    graphs: "auto" replays the model's forward and backward pass as CUDA graphs where that can be
        done, for the Llama family in one process without adapters; "on" refuses elsewhere; "off"
        keeps TRL's own passes

    Several updates per rollout (`num_iterations`, `steps_per_generation`), PEFT, vLLM, DDP, FSDP2
    and DeepSpeed work as in TRL. A run resumed from a checkpoint is the same run, in any epoch,
    if the checkpoint lies between two rollouts; in the midst of one TRL draws a new one. Arguments
    of GRPOConfig that a recipe decides are refused (docs/trl-arguments.md); one line at the start
    names their defaults that mean something else than the recipe. `kl`, `entropy` and
    `clip_ratio/*` are logged as by TRL, the recipe's metrics as `proxpo/...`.
    """

    args: GRPOConfig
    _buffered_inputs: Any
    _states: States

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        *rest: Any,
        recipe: str | Recipe = "isopo",
        recipe_options: Settings | None = None,
        batch_every: int = 0,
        graphs: str = "auto",
        **trl: Any,
    ) -> None:
        graphs = resolve(graphs, ("auto", "on", "off"), what="graphs of ProxpoTrainer")
        if batch_every < 0:
            raise ProxpoError(f"batch_every is a number of steps, 0 for none, got {batch_every}")
        self._batch_every = batch_every
        self._recorder: BatchRecorder | None = None
        self.recipe = resolve_recipe(recipe, recipe_options)
        args = copy.copy(args) if args is not None else GRPOConfig(f"proxpo-{self.recipe.name}")
        self.recipe = at_length(self.recipe, args.max_completion_length)
        reports_logp = args.use_vllm or trl.get("rollout_func") is not None
        check_recipe(self.recipe, args, reports_logp=reports_logp)
        self._needs = self.recipe.needs()
        losses = [
            as_trl(loss, args, parts=self._parts)
            for loss in variants(self.recipe) or (self.recipe,)
        ]
        self._recorders = [ClipRecorder.of(loss) for loss in losses]
        self._variants = tuple(recorder.recipe for recorder in self._recorders)
        self._needs_before_update = set().union(*map(fields_before_update, self._variants))
        gradient = self.recipe.gradient
        self._transform = None if gradient is None else gradient.apply()
        self._states = self.recipe.init_state()
        self._rollouts: dict[str, list[GenerationBatch]] = {}
        self._optimizer_step: OptimizerStep | None = None
        self._block = ExitStack()  # holds the transform open until TRL's backward is done
        self._skipped = 0
        notices = [replaced_defaults(self.recipe, args)]
        beta = args.beta
        if "ref_logp" in self._needs:
            args.beta = 1.0  # TRL's switch for reference log-probabilities; its loss does not run
        name = self.recipe.name or "recipe"  # of the model card, which would say GRPO
        self._name, self._tag_names = f"{name} (proxpo)", ["trl", "proxpo", name]
        self._paper = paper_of(self.recipe)
        super().__init__(model, reward_funcs, args, train_dataset, *rest, **trl)
        self.args.beta = beta
        check_updates(self.recipe, self.args)  # accelerator_config may have changed them
        microbatches = args.gradient_accumulation_steps * self.accelerator.num_processes
        notices.append(microbatch_dependence(self.recipe, microbatches))
        for notice in filter(None, notices):
            if self.accelerator.is_main_process:
                print(f"proxpo: {notice}", file=sys.stderr, flush=True)
        if self._transform is not None:
            check_engine(self.recipe, self)
        self.add_callback(_RunEvents(self))
        if args.use_vllm:
            mend_sync(self.vllm_generation)
        # Around the methods as a subclass has them: the recipe reads what they return.
        self.__dict__.update(
            _calculate_rewards=partial(self._keep_scores, self._calculate_rewards),
            _generate_and_score_completions=partial(
                self._prepare_rollout, self._generate_and_score_completions
            ),
        )
        self._graphs_wanted = graphs
        if graphs == "on":
            self._find_graphs()  # to refuse now rather than at the first step

    # --- rollout: group logic where the groups are whole

    def _keep_scores(self, calculate: Callable[..., Tensor], *given: Any, **named: Any) -> Tensor:
        self._scores = calculate(*given, **named)
        return self._scores

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = self._numbered(super()._generate_and_score_completions(inputs))
        return output | {TRL_ADVANTAGES: output["advantages"].clone()}

    def _numbered(self, output: dict[str, Any]) -> dict[str, Any]:
        """The completions with their numbers in the whole generation batch."""
        rows = len(output["prompt_ids"])
        first = self.accelerator.process_index * rows
        return {ROW: torch.arange(first, first + rows, device=self.accelerator.device)} | output

    def _prepare_rollout(self, generate: Callable[[Any], dict[str, Any]], inputs: Any) -> Any:
        output = self._numbered(generate(inputs))
        mode = "train" if self.model.training else "eval"
        rows = len(output["prompt_ids"])
        first = self.accelerator.process_index * rows
        order = output[ROW].argsort()
        fields = {name: x[order] for name, x in self._fields(output).items()}
        size: Any = self.num_generations if mode == "train" else self.num_generations_eval
        if mode == "eval":
            check_evaluated(self.recipe, rows, size)
        rewards = weighted_rewards(self._scores, self.reward_weights)
        self._rollouts[mode] = [
            prepared(
                recipe,
                fields,
                Context(
                    states=self._states,
                    clock=self._clock(),
                    generator=generator(self.args.seed, "rollout", self.state.global_step),
                ),
                rewards=rewards.to(torch.promote_types(self.model.dtype, torch.float32)),
                group_size=size,
                first=first,
                version=self.state.global_step,
                gather=self._gather,
            )
            for recipe in self._variants
        ]
        if mode == "train":
            here = slice(first, first + rows)
            group = torch.arange(first, first + rows, device=rewards.device) // size
            known = {**fields, "rewards": rewards[here], "group": group}
            self._recorder = BatchRecorder(known) if self._saves_batch() else None
        for rollout in self._rollouts[mode]:
            for name, value in logged(rollout.metrics).items():
                self._metrics[mode][f"proxpo/{name}"].append(float(value))
        return output

    def _fields(self, output: dict[str, Any]) -> dict[str, Tensor]:
        """Completions of this process as Batch fields, scored where TRL did not and we must."""
        old, needs = output.get("old_per_token_logps"), self._needs_before_update
        score = has_unscored_tokens(output) or "old_logp" in needs or "prox_logp" in self._needs
        scored = {}
        if "entropy" in needs or (old is None and score):
            scored = self._score(output)
        return batch_fields(
            output,
            old=scored.get("logp") if old is None else old,
            entropy=scored.get("entropy") if "entropy" in needs else None,
            ends=[*self.eos_token_ids, self._tokenizer.pad_token_id],
            proximal="prox_logp" in self._needs,
        )

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return EpochSampler(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        new = self.model.training and self._buffered_inputs is not before
        if new and needs_whole_groups(self.recipe):
            self._buffered_inputs = in_generation_order(self._buffered_inputs)
            inputs = self._buffered_inputs[self._step % self._per_iteration]
        return inputs

    # --- update: one micro-batch, in the order in which TRL calls these

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """TRL's: `_compute_loss`, then backward; a transform that the loss opens sees both."""
        try:
            with ExitStack() as self._block:
                loss = super().training_step(model, inputs, num_items_in_batch)
        except NotFiniteError:  # the gradient is not either, on any process: see `_end_update`
            if self.is_deepspeed_enabled:  # its engine has made the step already
                raise
        if self._step % self._per_rollout == 0:
            for recipe, rollout in zip(self._variants, self._rollouts["train"]):
                states = recipe.update_state(self._states, rollout.whole, rollout.metrics)
                self._states = states or self._states
            self._save_batch()
        return loss

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The recipe's loss of a micro-batch, for TRL to back-propagate.

        Under a transform the value is still that of the loss; its gradient is the transform's
        objective, and the transform stays open until TRL's backward is done.
        """
        check_advantages(self.recipe, inputs)
        mode = "train" if self.model.training else "eval"
        step = self._step_of(mode, inputs)
        batch, processes = step.microbatch(inputs), self.accelerator.num_processes
        lag = self.state.global_step - step.rollout.version
        batch = batch.replace(lag=torch.full_like(batch.mask, lag, dtype=torch.long))
        transformed = self._transform is not None and torch.is_grad_enabled()
        forward = partial(self._present, model, inputs, batch)
        aux: list[Tensor] = []
        with ExitStack() as block:
            objective, loss, fields = block.enter_context(
                backward_pass(
                    step.recorder.recipe,
                    batch,
                    replace(step.ctx, generator=self._noise()),
                    forward=partial(forward, entropy=True, aux=aux),
                    forward_rest=forward,
                    applied=self._applied(model, inputs, batch) if transformed else None,
                    policy_sum=step.policy_sum,
                    ranks=processes,  # engines average over processes
                    backward=self._backward,
                )
            )
            if transformed:
                self._block.push(block.pop_all())
        value = objective
        if transformed:
            value = processes * loss.value.detach() + objective - objective.detach()
        for router_loss in aux:
            parts = self.current_gradient_accumulation_steps if mode == "train" else 1
            value = value + self.router_aux_loss_coef * router_loss / parts
            mean = self.accelerator.gather_for_metrics(router_loss.detach()).mean()
            self._metrics[mode]["aux_loss"].append(mean.item())
        present = batch.replace(**fields)
        if self.args.entropy_coef:
            self._log_bonus(mode, step, loss.value.detach(), present)
        self._log(mode, step, loss.metrics, present)
        if mode == "train" and self._recorder is not None:
            self._recorder.see(inputs[ROW] - step.rollout.first, fields)
        return value

    def _backward(self, value: Tensor) -> None:
        """Back-propagates terms that a transform leaves out; TRL's own backward adds to them."""
        if self.is_deepspeed_enabled:  # its engine would make the optimizer step as well
            engine = self.accelerator.deepspeed_engine_wrapped
            engine.backward(value, sync_gradients=False, scale_wrt_gas=False)
        else:
            self.accelerator.backward(value)

    def _begin_run(self) -> None:
        """Begins with a new rollout, whatever an earlier call of `train` has left unfinished."""
        self._step, self._buffered_inputs, self._optimizer_step = 0, None, None
        self._skipped = 0
        if self._transform is not None:
            self._transform.step(skipped=True)  # drops lengths of an update that was interrupted

    def _end_update(self) -> None:
        """Ends the transform's update; one that is not finite is skipped and leaves no trace."""
        if self._transform is None:
            return
        optimizer: Any = self.optimizer
        trained = (p for group in optimizer.param_groups for p in group["params"])
        norm = get_total_norm([p.grad for p in trained if p.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        finite = bool(torch.isfinite(norm))
        self._skipped = 0 if finite else self._skipped + 1
        if not finite:
            optimizer.zero_grad()  # without gradients an optimizer's step does nothing
            warnings.warn(
                f"step {self.state.global_step}: an update was left out, its gradient was not "
                "finite",
                stacklevel=2,
            )
        self._metrics["train"]["proxpo/skipped"].append(float(self._skipped))
        if finite:
            total = partial(self.accelerator.reduce, reduction="sum")
            for name, value in gradient_lengths(self._transform, total=total).items():
                self._metrics["train"][f"proxpo/{name}"].append(value.item())
        self._transform.step(skipped=not finite)
        if self._skipped >= MOST_SKIPPED:
            raise ProxpoError(
                f"step {self.state.global_step}: the gradient was not finite in {MOST_SKIPPED} "
                "updates in a row; lower learning_rate or set max_grad_norm"
            )

    # --- the optimizer step that a micro-batch belongs to

    def _step_of(self, mode: str, inputs: dict[str, Any]) -> OptimizerStep:
        """The optimizer step of this micro-batch; every process enters it together."""
        if mode == "eval":
            return self._open_step(self.model, 0, mode, [inputs])
        parts = self.args.gradient_accumulation_steps
        iteration, place = divmod(self._step % self._per_rollout, self._per_iteration)
        if self._optimizer_step is None or place % parts == 0:
            variant = iteration * len(self._variants) // self.num_iterations
            accumulated = self._buffered_inputs[place - place % parts :][:parts]
            self._optimizer_step = self._open_step(self.model_wrapped, variant, mode, accumulated)
        return self._optimizer_step

    def _open_step(
        self, model: nn.Module, variant: int, mode: str, inputs: list[dict[str, Any]]
    ) -> OptimizerStep:
        """Counts over all processes, and sums where the recipe takes statistics of the batch."""
        recipe, rollout = self._variants[variant], self._rollouts[mode][variant]
        rows = self._gather(torch.cat([part[ROW] for part in inputs]))
        share = None
        if mode == "train" and counts_generation(recipe, self.args):
            share = self.args.gradient_accumulation_steps / self._per_iteration
        denominators, group_tokens = counts_of_step(rollout, rows, share=share)
        ranks = over_ranks() if self.accelerator.num_processes > 1 else local
        step = OptimizerStep(
            recorder=self._recorders[variant],
            rollout=rollout,
            inputs=inputs,
            group_tokens=group_tokens,
            tokens=rollout.whole.mask[rows].sum(),
            ctx=Context(
                all_sum=ranks if needs_whole_groups(recipe) else groups_over_processes(ranks),
                denominators=denominators,
                states=self._states,
                clock=self._clock(),
            ),
        )
        if len(inputs) > 1:
            if self._transform is not None and policy_term(recipe) != recipe:
                step.policy_sum = self._sums(step, policy_term(recipe), model)
            step.ctx = replace(step.ctx, all_sum=self._sums(step, recipe, model))
        return step

    def _sums(self, step: OptimizerStep, recipe: Recipe, model: nn.Module) -> AllSum:
        """Sums over all processes, and over the micro-batches if the recipe asks for any."""

        @torch.no_grad()
        def microbatches() -> list[Batch]:
            warn_of_dropout(recipe, model)
            batches = [step.microbatch(part) for part in step.inputs]
            fields = map(partial(self._present, model), step.inputs, batches)
            return [batch.replace(**present) for batch, present in zip(batches, fields)]

        first = step.microbatch(step.inputs[0])
        made_up = {"logp": first.logp, "entropy": first.logp}
        if first.old_logp is None:
            made_up["old_logp"] = first.logp
        scopes: tuple[Reach, ...] = ("batch", "rank")
        return sums_over_step(
            recipe,
            first.replace(**made_up),
            step.ctx,
            microbatches=microbatches,
            scopes=scopes[:1] if needs_whole_groups(recipe) else scopes,
        )

    def _noise(self) -> torch.Generator:
        """Random numbers of a micro-batch's loss."""
        part = self._step % self.args.gradient_accumulation_steps
        process = self.accelerator.process_index
        return generator(self.args.seed, "loss", self.state.global_step, part, process)

    def _clock(self) -> Clock:
        """TRL's optimizer steps, which are the steps of a recipe that follows the run."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return Clock(
            step=self.state.global_step,
            steps=self.state.max_steps or None,
            learning_rate=groups[0]["lr"] if groups else None,
        )

    @property
    def _per_iteration(self) -> int:
        """Micro-batches of a rollout."""
        microbatches: Any = self.args.steps_per_generation
        return microbatches

    @property
    def _per_rollout(self) -> int:
        """Micro-batches from one rollout to the next."""
        return self._per_iteration * self.num_iterations

    def _gather(self, x: Tensor) -> Tensor:
        """All processes' rows; accelerate pads a bool to whole numbers, but only where it pads."""
        if x.dtype == torch.bool:
            return self._gather(x.to(torch.uint8)).bool()
        padded = self.accelerator.pad_across_processes(x, dim=1) if x.dim() > 1 else x
        return self.accelerator.gather(padded)

    # --- metrics and checkpoints

    def _log(self, mode: str, step: OptimizerStep, metrics: Metrics, batch: Batch) -> None:
        """Logs TRL's metrics of the micro-batch, and the recipe's once the step is complete."""
        recorder, total = step.recorder, partial(self.accelerator.reduce, reduction="sum")
        named = trl_metrics(recorder, batch, metrics, total=total, gather=self.accelerator.gather)
        for name, number in named.items():
            self._metrics[mode][name].append(number)
        parts = len(step.inputs) * self.accelerator.num_processes
        share = share_of_step(batch.mask.sum(), step.tokens, parts=parts)
        step.metrics = combined(recorder.recipe, step.metrics, logged(metrics), share=share)
        step.done += 1
        if step.done < len(step.inputs) or not step.metrics:
            return
        table = self.accelerator.gather(torch.stack(list(step.metrics.values()))[None]).cpu()
        for name, column in zip(step.metrics, table.unbind(dim=1)):
            value = float(joined(name, column.unbind()))
            self._metrics[mode][f"proxpo/{name}"].append(value)

    def _log_bonus(self, mode: str, step: OptimizerStep, value: Tensor, batch: Batch) -> None:
        """Logs the loss without TRL's entropy bonus, and the bonus's coefficient, as TRL does."""
        coef, processes = self.args.entropy_coef, self.accelerator.num_processes
        entropies = batch.require("entropy", by="GRPOConfig.entropy_coef").detach()
        entropy = masked_mean(entropies, batch.mask)
        policy = value + coef * entropy / self._parts()
        scale = processes if counts_generation(step.recorder.recipe, self.args) else self._parts()
        mean = self.accelerator.reduce(scale * policy, reduction="mean")
        self._metrics[mode]["policy_loss"].append(mean.item())
        if mode == "train" and step.done + 1 == len(step.inputs):
            self._metrics[mode]["entropy_coef"].append(coef)

    def _parts(self) -> int:
        """Micro-batches of an optimizer step, of all processes; evaluation accumulates none."""
        accumulated = self.args.gradient_accumulation_steps if self.model.training else 1
        return int(accumulated * self.accelerator.num_processes)

    def _saves_batch(self) -> bool:
        """True if one of the rollout's optimizer steps is a multiple of `batch_every`."""
        done, every = self.state.global_step, self._batch_every
        updates = self._per_rollout // self.args.gradient_accumulation_steps
        return bool(every) and (done + updates) // every > done // every

    def _save_batch(self) -> None:
        """Writes the rollout's batch, of all processes, at the end of its last optimizer step."""
        if self._recorder is None:
            return
        fields = {name: self._gather(x) for name, x in self._recorder.fields().items()}
        if self.accelerator.is_main_process:
            folder: Any = self.args.output_dir
            save_step(folder, self.state.global_step + 1, fields)
        self._recorder = None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.should_save:  # first, so that a checkpoint TRL has finished is never without
            step = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder = Path(self._get_output_dir(trial=trial)) / step
            folder.mkdir(parents=True, exist_ok=True)
            write_memory(folder, self.recipe, self._states, self._transform)
            if self.args.sync_ref_model and not self._shards_reference():
                write_reference(folder, self.accelerator.unwrap_model(self.ref_model))
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._states = read_memory(Path(checkpoint), self.recipe, self._transform)
            if self.args.sync_ref_model:
                read_reference(Path(checkpoint), self.accelerator.unwrap_model(self.ref_model))

    def _shards_reference(self) -> bool:
        """True if no process holds the whole reference model."""
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        return self.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)


__all__ = ["ProxpoTrainer"]
