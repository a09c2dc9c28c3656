"""Recipes in control: fields that episodes can feed, and losses that take steps one by one."""

import torch

from proxpo.compose import count, policy_loss, prepare
from proxpo.control.environments import Environments
from proxpo.errors import ProxpoError
from proxpo.stages.ratio.gaussian import GAUSSIAN
from proxpo.train.batch import TrainingBatch
from proxpo.train.experience import Experience
from proxpo.types import FIELDS, Batch, Context, Recipe, local

# Fields that an episode, the policy, its critic or a copy of its start bring.
PROVIDED = {
    *("logp", "mask", "old_logp", "prox_logp", "rollout_logp", "ref_logp", "entropy", "values"),
    *("old_values", "rewards", "token_rewards", "group", "truncated", "lag"),
}
OF_A_LIST = {"vocab_logp", "old_vocab_logp", "tokens"}  # where actions are chosen from a list
WITHOUT = {
    "budget": "an environment has no prompts to spend a budget on",
    "prompts": "an environment has no prompts to choose from",
}


def check_recipe(recipe: Recipe, environments: Environments, actor: torch.nn.Module) -> None:
    """Refuses a recipe that reads a batch field which nothing in control provides."""
    task, discrete = f"gym:{environments.name}", environments.actions.discrete
    known = PROVIDED | (OF_A_LIST if discrete and not actor.memory else set())
    for _, stage in recipe.stages():
        if stage.kind in WITHOUT:
            raise ProxpoError(
                f"{recipe.name}: {stage.kind}={stage.name} does not act in control: "
                f"{WITHOUT[stage.kind]}; --set {stage.kind}=none leaves it out"
            )
        for name in stage.needs:
            if name in known or FIELDS[name].source in ("recipe", "schedule"):
                continue
            reason = f"an episode of {task} does not bring it"
            if name in OF_A_LIST:
                reason = f"the actions of {task} are numbers, not a list to choose from"
                reason = (
                    "with model.name=gru the internal state is drawn too" if discrete else reason
                )
            raise ProxpoError(
                f"{recipe.name}: {stage.kind}={stage.name} needs the batch field '{name}' "
                f"({FIELDS[name].doc}), and {reason}"
            )
    if "entropy" in recipe.needs() and getattr(actor, "squashed", False):
        raise ProxpoError(
            f"{recipe.name}: model.options.distribution=tanh has no entropy in closed form, which "
            "this recipe reads"
        )
    if recipe.schedule is not None and "optimizer" in recipe.schedule.decides:
        raise ProxpoError(
            f"{recipe.name}: schedule={recipe.schedule.name} works on a language model's logits "
            "and does not act in control"
        )


def by_step(recipe: Recipe) -> bool:
    """True if the loss of a prepared rollout is that of its steps as rows of their own.

    Found by computing both on a made-up rollout with rows of unequal lengths. Then mini-batches
    are drawn from single steps; else from whole rows, as they are with a schedule or a transform.
    """
    if recipe.schedule is not None or recipe.gradient is not None:
        return False
    draws = torch.Generator().manual_seed(0)
    mask = torch.arange(5) < torch.tensor([5, 3, 2, 4])[:, None]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    fields = {
        name: random(*mask.shape)
        for name in ("logp", "old_logp", "prox_logp", "rollout_logp", "ref_logp", "values")
    }
    vectors = {
        field.name: random(*mask.shape, *([2] if field.last else [])).abs() + 0.1
        for field in GAUSSIAN
    }
    rewards, group = random(4), torch.tensor([0, 0, 1, 1])
    batch = Batch(
        mask=mask,
        **fields,
        **vectors,
        old_values=random(*mask.shape),
        entropy=random(*mask.shape).abs(),
        vocab_logp=random(*mask.shape, 3).log_softmax(-1),
        old_vocab_logp=random(*mask.shape, 3).log_softmax(-1),
        tokens=torch.zeros_like(mask).long(),
        rewards=rewards,
        group=group,
        truncated=rewards > 0,
        lag=torch.zeros(mask.shape, dtype=torch.long),
    )
    experience = Experience(
        input_ids=mask.long(),
        attention_mask=mask,
        mask=mask,
        rollout_logp=fields["rollout_logp"],
        rewards=rewards,
        truncated=rewards > 0,
        group=group,
        version=group,
    )
    losses = []
    try:
        states = recipe.init_state()
        ready, _, _ = prepare(recipe, batch, Context(all_sum=local, states=states))
        for each in (ready, TrainingBatch(experience, ready).steps().batch):
            ctx = Context(all_sum=local, denominators=count(each))
            losses.append(policy_loss(recipe, each.replace(logp=each.logp * 1.01), ctx).value)
    except ProxpoError:  # of rewards that no environment gave
        return False
    return torch.allclose(losses[0], losses[1], rtol=1e-9, atol=1e-12)


__all__ = ["PROVIDED", "by_step", "check_recipe"]
