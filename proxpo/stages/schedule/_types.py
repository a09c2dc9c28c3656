"""`Updates`: a rollout as a schedule sees it, and the steps that a schedule can ask for."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from proxpo.exact.policy import ActionBatch, FlatPolicy
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.types import Batch, Metrics, Recipe

Weights = list[Tensor]


class Rescale(NamedTuple):
    """A factor on the policy's gradient before the optimizer's step: factor(‖∇ loss‖)."""

    loss: Recipe
    factor: Callable[[float], float]


@runtime_checkable
class Updates(Protocol):
    """One rollout and the updates that a schedule can make on it; a trainer provides it.

    A schedule's function is `apply(updates, ctx) -> (state, metrics)`: it makes the optimizer steps
    it wants and returns its own next state. `count` is how many the settings ask for, `parts` into
    how many mini-batches they cut the rollout. A schedule that does not follow these, or makes its
    steps without the `optimizer` or the recipe's `loss`, declares so in `decides`, and a host
    refuses the settings.
    """

    count: int
    parts: int
    recipe: Recipe

    def step(
        self,
        n: int = 1,
        *,
        parts: int | None = None,
        recipe: Recipe | None = None,
        rows: Int[Tensor, " row"] | None = None,
        only: bool = False,
        rescale: Rescale | None = None,
    ) -> Metrics:
        """n optimizer steps, each on the next mini-batch; the metrics of the last.

        parts=1 takes the whole rollout each time. `rows` takes those rows, `recipe` another loss.
        only=True promises that no other step follows, which may save a pass of the model. `rescale`
        measures a second gradient and multiplies the policy's by a factor of its norm.
        """
        ...

    def variant(self, recipe: Recipe) -> "Updates":
        """The same rollout under another recipe, prepared anew at the policy of its first step."""
        ...

    def replay(self, *, start: int = 0, batch: float | None = None) -> bool:
        """One step on replayed data; none, and False, while fewer than `start` responses are kept.

        The data are one earlier rollout, drawn at random, or `batch` times the prompts of a rollout
        from all that are kept; where that is more than there are, all of them.
        """
        ...

    def mix(self, *, share: float, rollouts: int) -> None:
        """Before the first step: takes each prompt, with chance `share`, from the last rollouts."""
        ...

    def keep(self, *, samples: int = 0, rollouts: int = 0) -> None:
        """Keeps earlier rollouts: this many, or as many as have this many samples."""
        ...

    def gather(self, *, tokens: int) -> None:
        """Before the first step: adds the newest earlier samples, up to so many tokens in all."""
        ...

    def fit_critic(self, *, draws: int, batch: int, lr: float) -> float:
        """One AdamW step of the critic alone, towards the rewards; the mean squared error.

        Its gradient is the mean over `draws` draws of `batch` tokens each.
        """
        ...

    def batch(self) -> Batch:
        """The prepared rollout, with the policy's numbers from before the first step."""
        ...

    def now(self, rows: Int[Tensor, " row"]) -> Batch:
        """These rows with the policy's present numbers, without gradient or dropout."""
        ...

    def add(self, **fields: Float[Tensor, "seq tok"]) -> None:
        """Further fields of the batch, for the losses of the steps to come."""
        ...

    def weights(self) -> Weights:
        """A copy of the trained weights."""
        ...

    def load(self, weights: Weights) -> None:
        """Puts weights in place; the optimizer keeps its moments."""
        ...

    def optimizer_state(self) -> dict[str, Any]:
        """A copy of the optimizer's state."""
        ...

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Puts the optimizer's state back."""
        ...

    def logp(self, weights: Weights) -> Float[Tensor, "seq tok"]:
        """Log-probabilities of the rollout under other weights."""
        ...

    def exact(self) -> tuple[FlatPolicy, ActionBatch]:
        """The model as a function of its parameters, and the rollout it is judged on."""
        ...


def variants(recipe: Recipe) -> tuple[Recipe, ...] | None:
    """Losses that the updates of a rollout take in turn; None if the schedule does more than that.

    A host that makes the updates itself can follow such a schedule: an even share of the updates
    for each loss. Without a schedule the recipe itself is the only one.
    """
    if recipe.schedule is None:
        return (recipe,)
    declared = getattr(recipe.schedule.apply, "variants", None)
    return None if declared is None else declared(recipe)


__all__ = ["Rescale", "Updates", "Weights", "variants"]
