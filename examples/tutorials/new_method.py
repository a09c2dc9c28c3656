# %% [markdown]
# # A new method in one file
#
# A method is a composition of stages. Say you want "RankPO": the advantage is the rank of a
# reward within its group, from -1 to 1, under P3O's cap on the ratio. The cap and the average
# exist; the advantage is new, so it becomes a stage. Everything else of proxpo then knows the
# method.

# %%

import proxpo
from proxpo import Recipe, register, stage
from proxpo.ops.masked import spread
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import token
from proxpo.stages.trust import ess_cap


@stage("advantage", needs=("rewards", "group"))
def reward_rank():
    """A_i = (responses of the group with a lower reward - those with a higher one) / (n - 1)."""

    def advantage(batch, ctx):
        r, same = batch.rewards, batch.group[:, None] == batch.group
        better = (r[:, None] > r).to(r) - (r[:, None] < r).to(r)
        others = (same.sum(dim=1) - 1).clamp(min=1)
        return spread((better * same).sum(dim=1) / others, batch.mask), {}

    return advantage


@register("rankpo", paper="arXiv:0000.00000", confidence="paper formulas")
def rankpo() -> Recipe:
    """RankPO: the rank of a reward within its group, under P3O's cap.

        A_i = (#{j: r_j < r_i} - #{j: r_j > r_i}) / (n - 1)

    Reference: this tutorial.
    """
    return Recipe(advantage=reward_rank(), ratio=token(), trust=ess_cap(), aggregate=token_mean())


# %% [markdown]
# Look at it on the included batch, beside GRPO: the advantage of every response, and which way a
# step would push it.

# %%
from proxpo.batch_file import load_batch
from proxpo.inspection import inspect_batch

batch = load_batch("sample")
shown = {name: inspect_batch(proxpo.make_recipe(name), batch) for name in ("rankpo", "grpo")}
print("response  reward  " + "  ".join(f"A {name:>6}" for name in shown))
for i, reward in enumerate(batch.rewards.tolist()):
    numbers = "  ".join(
        f"{seen.advantages.view(len(batch.mask), -1)[i, 0]:8.2f}" for seen in shown.values()
    )
    print(f"{i:8}  {reward:6.2f}  {numbers}")

# %% [markdown]
# It trains as any other: `loss_fn("rankpo")` in your own loop, `recipe="rankpo"` in TRL. Its stage
# can be swapped into other methods, under its name:

# %%
print(proxpo.make_recipe("dr-grpo", {"advantage": "reward_rank"}).advantage)

# %% [markdown]
# On the command line `proxpo` knows the methods of installed packages. With the code above in
# `rankpo.py`, `python -c "import rankpo; from proxpo.cli import main; main()" inspect rankpo
# --batch sample` does for a first look; for more, a package announces the module under the entry
# point `proxpo.recipes`, and `proxpo train --method rankpo` works as for any other. That, tests
# against plain loops and a page of its own: [add a method](../../CONTRIBUTING.md).
