"""Jobs of recipes on a denoiser: samples are rollouts, a denoising step is a token."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from proxpo.control.checks import by_step
from proxpo.control.recipe_job import ControlPolicy
from proxpo.errors import ProxpoError
from proxpo.generative.diffusion import (
    DenoisingPolicy,
    Trajectories,
    log_density,
    make_chain,
    path_kl,
    sample,
)
from proxpo.generative.networks import HIDDEN, TimeField, in_the_box, zero_at_start
from proxpo.generative.results import answers, diversity, result, samples_figure
from proxpo.generative.tasks import SampleTask, make_sample_task
from proxpo.ops.shapes import Float, Tensor
from proxpo.ops.streams import derive, generator
from proxpo.settings import at_length
from proxpo.stages.ratio.gaussian import GAUSSIAN
from proxpo.train.batch import REFERENCE
from proxpo.train.collect import Collected
from proxpo.train.config import Config
from proxpo.train.experience import Experience
from proxpo.train.job import Examined
from proxpo.train.observer import SILENT, Observer
from proxpo.train.refusals import unused
from proxpo.train.rollout_metrics import equal_rewards
from proxpo.train.rollouts import RolloutJob
from proxpo.train.scoring import Learner, run_optimizer
from proxpo.types import FIELDS, Recipe

# Fields that a chain of denoising steps, its policy, its critic or a copy of its start bring.
PROVIDED = {
    *("logp", "mask", "old_logp", "prox_logp", "rollout_logp", "ref_logp", "values", "old_values"),
    *("rewards", "group", "truncated", "lag", *(field.name for field in GAUSSIAN)),
}
WITHOUT = ("budget", "prompts", "gradient")


class StepValue(nn.Module):
    """V(x_t, t) of a state (x_t, number of the step)."""

    times: Tensor

    def __init__(self, size: int, times: Float[Tensor, " tok"], *, hidden: int) -> None:
        super().__init__()
        self.register_buffer("times", times, persistent=False)
        self.field = zero_at_start(TimeField(size, 1, hidden=hidden))

    def forward(self, state: Float[Tensor, "*row obs"]) -> Float[Tensor, "*row 1"]:
        return self.field(state[..., :-1], self.times[state[..., -1].long()])


@dataclass(kw_only=True)
class DenoisingJob(RolloutJob):
    """A denoiser, trained by a recipe on rewards of its samples."""

    task: SampleTask
    initial: DenoisingPolicy

    @property
    def model(self) -> DenoisingPolicy:
        return self.learner.policy.model

    @property
    def most_parts(self) -> int:
        rollout = self.config.rollout
        steps = rollout.samples_per_prompt * rollout.max_tokens if self.learner.by_step else 1
        return rollout.prompts_per_step * steps

    def remarks(self) -> list[str]:
        cut = "denoising steps" if self.learner.by_step else "groups of samples"
        line = f"{self.learner.recipe.name}: mini-batches are drawn from {cut}"
        return [*unused(self.config, self.learner.recipe).values(), line]

    def collect(self, number: int, observer: Observer = SILENT) -> Collected:
        rollout, seed = self.config.rollout, self.config.seed
        rows = rollout.prompts_per_step * rollout.samples_per_prompt
        drawn = sample(
            self.model,
            rows,
            generator(seed, "sample", number),
            progress=lambda done, total: observer.on_progress("sampling", done, total),
        )
        rewards = self.task.reward(drawn.samples)
        first = derive(seed, "group", number) % 2**40
        group = first + torch.arange(rows) // rollout.samples_per_prompt
        metrics = {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std(correction=0)),
            "frac_reward_zero_std": equal_rewards(rewards, group),
            "diversity": diversity(drawn.samples),
            "proxpo/samples": float(rows),
            "proxpo/tokens": float(rows * len(self.model)),
        }
        lines = answers(rewards)
        return Collected(self._experience(drawn, rewards, group), metrics, lines)

    def _experience(self, drawn: Trajectories, rewards: Tensor, group: Tensor) -> Experience:
        rows, steps = drawn.actions.shape[:2]
        mask = torch.ones(rows, steps, dtype=torch.bool)
        std = self.model.std.repeat(rows, 1)
        return Experience(
            input_ids=mask.long(),
            attention_mask=mask,
            mask=mask,
            rollout_logp=log_density(drawn.actions, drawn.means, std),
            rewards=rewards,
            truncated=torch.zeros(rows, dtype=torch.bool),
            group=group,
            version=torch.full((rows,), self.learner.version),
            observations=drawn.states,
            actions=drawn.actions,
            old_mean=drawn.means,
            noise=std,
            step_size=torch.full_like(std, 1 / steps),
            time=self.model.time.repeat(rows, 1),
        )

    # --- evaluation

    def _exam(self, model: DenoisingPolicy) -> Trajectories:
        """Samples of an evaluation, from the same noise at every one."""
        return sample(model, self.config.evaluate.size, generator(0, "exam"))

    def examine(self, observer: Observer) -> Examined:
        observer.on_progress("evaluating", 0, 1)
        drawn = self._exam(self.model)
        rewards = self.task.reward(drawn.samples)
        metrics = {
            "eval/reward": float(rewards.mean()),
            "eval/reward_std": float(rewards.std(correction=0)),
            "eval/diversity": diversity(drawn.samples),
            "eval/kl": float(path_kl(self.model, self.initial, drawn).mean()),
        }
        return metrics, answers(rewards)

    def figure(self) -> Any:
        models = (("before", self.initial), ("after", self.model))
        return samples_figure([(title, self._exam(model).samples) for title, model in models])

    def result(self, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
        return result(
            before,
            after,
            score="mean reward",
            unit="denoising steps",
            count=self.tokens,
            seconds=self.seconds,
        )


def step_fields(
    model: Any, critic: Any, rows: Experience, wanted: frozenset[str]
) -> dict[str, Tensor]:
    """Fields of the present policy at every denoising step."""
    assert rows.observations is not None
    assert rows.actions is not None
    step = model(rows.observations)
    fields = {"logp": log_density(rows.actions, step.mean, step.std)}
    own = {"mean": step.mean, "predicted_noise": step.predicted_noise}
    fields |= {name: value for name, value in own.items() if name in wanted}
    if critic is not None:
        fields["values"] = critic(rows.observations)[..., 0]
    return fields


def check_recipe(recipe: Recipe, task: str) -> None:
    """Refuses a recipe that reads a batch field which denoising steps do not bring."""
    for _, stage in recipe.stages():
        if stage.kind in WITHOUT:
            raise ProxpoError(
                f"{recipe.name}: {stage.kind}={stage.name} does not act on generative models; "
                f"--set {stage.kind}=none leaves it out"
            )
        for name in stage.needs:
            if name not in PROVIDED and FIELDS[name].source not in ("recipe", "schedule"):
                raise ProxpoError(
                    f"{recipe.name}: {stage.kind}={stage.name} needs the batch field '{name}' "
                    f"({FIELDS[name].doc}), and a denoising step of task {task} is a Gaussian "
                    "action, not a token"
                )
    if recipe.schedule is not None and "optimizer" in recipe.schedule.decides:
        raise ProxpoError(
            f"{recipe.name}: schedule={recipe.schedule.name} works on a language model's logits "
            "and does not act on generative models"
        )


def build_denoising_job(config: Config, recipe: Recipe, dtype: torch.dtype) -> DenoisingJob:
    """Builds the job of a recipe: the denoiser in the box, its critic, its optimizer."""
    task = make_sample_task(config.task.name)
    check_recipe(recipe, task.name)
    recipe, wanted = at_length(recipe, config.rollout.max_tokens), recipe.needs()
    chain = make_chain(config.rollout.max_tokens)
    hidden = HIDDEN[task.model]
    denoiser = TimeField(task.size, task.size, hidden=hidden)
    policy = DenoisingPolicy(
        in_the_box(denoiser, f"{task.model}_denoiser", dtype), chain, task.size
    )
    initial = copy.deepcopy(policy).requires_grad_(False)
    critic = None
    if wanted & {"values", "old_values"} or recipe.value is not None:
        critic = _critic(config, task, policy.time, hidden)
    critic_optimizer = None
    if critic is not None and recipe.value is None:
        critic_optimizer = torch.optim.AdamW(critic.parameters())
    buffered = recipe.schedule is not None and recipe.schedule.name == "transition_buffer"
    learner = Learner(
        policy=ControlPolicy(policy, config.model.name),
        recipe=recipe,
        optimizer=run_optimizer(config.train, policy, critic if recipe.value else None),
        fields_of=step_fields,
        by_step=by_step(recipe.replace(schedule=None) if buffered else recipe),
        reference=initial if wanted & REFERENCE else None,
        critic=critic,
        critic_optimizer=critic_optimizer,
        state=recipe.init_state(),
    )
    return DenoisingJob(config=config, learner=learner, task=task, initial=initial)


def _critic(config: Config, task: SampleTask, times: Tensor, hidden: int) -> StepValue:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "critic"))
        return StepValue(task.size, times, hidden=hidden).to(times.dtype)


__all__ = ["DenoisingJob", "StepValue", "build_denoising_job", "check_recipe", "step_fields"]
