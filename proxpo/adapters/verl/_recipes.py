"""Recipes under verl's names, and the reasons why some of them cannot run there."""

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from proxpo.adapters.verl._environment import engine_selected, notify
from proxpo.adapters.verl._settings import with_verl_settings
from proxpo.compose import count, policy_loss
from proxpo.errors import ProxpoError, fold, nearest
from proxpo.recipes import methods
from proxpo.settings import make_recipe
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import sequence
from proxpo.stages.schedule import variants
from proxpo.types import FIELDS, Batch, Clock, Context, Recipe, Stage

PREFIX = "proxpo_"
LOSS_KINDS = ("weights", "ratio", "trust", "regularisers", "select", "aggregate")
GROUP_KINDS = ("reward", "filter", "advantage", "prune")
UNSUPPORTED_KINDS = ("budget",)  # rollouts as verl makes them
# Fields that verl gives to a policy loss and to an estimator.
LOSS_FIELDS = {"logp", "old_logp", "mask", "advantages"}
GROUP_FIELDS = {"mask", "rewards", "token_rewards", "group"}
VERL_ALONE = {"gae": "gae", "greedy_baseline": "remax"}  # advantage stage: verl's estimator
INSTEAD = {
    "ref_logp": "set its option kl_coef=0 and let verl add the KL: actor.use_kl_loss=True, or "
    "algorithm.use_kl_in_reward=True",
    "rollout_logp": "verl's algorithm.rollout_correction weighs and rejects for every loss mode",
    "entropy": "verl's actor.entropy_coeff adds an entropy bonus to every loss mode",
    "values": "take verl's own algorithm.adv_estimator=gae",
    "greedy_rewards": "take verl's own algorithm.adv_estimator=remax",
}


class EngineField(NamedTuple):
    """A batch field that proxpo's engine adds to the arguments of a loss.

    setting: makes verl compute it; key: in verl's data, empty if it is computed from others
    """

    setting: str = ""
    key: str = ""


ENGINE_FIELDS = {
    "ref_logp": EngineField(
        "actor_rollout_ref.actor.use_kl_loss=True and kl_loss_coef=0", "ref_log_prob"
    ),
    "rollout_logp": EngineField(
        "actor_rollout_ref.rollout.calculate_log_probs=True", "rollout_log_probs"
    ),
    "entropy": EngineField("actor_rollout_ref.actor.calculate_entropy=True"),
    "prox_logp": EngineField(),
}


def needed_fields(recipe: Recipe) -> set[str]:
    """Fields that the recipe reads; the sampler's numbers too, beside a proximal policy."""
    needed = recipe.needs()
    return needed | {"rollout_logp"} if "prox_logp" in needed else needed


def missing_field(recipe: Recipe, name: str) -> ProxpoError:
    """The refusal of a run in which verl does not compute a field for proxpo's engine."""
    return ProxpoError(f"verl: {recipe.name} reads '{name}': set {ENGINE_FIELDS[name].setting}")


class _NoClock(Clock):
    """Clock that refuses to be read: verl gives losses and estimators no step number."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("step", "steps", "learning_rate"):
            raise ProxpoError(
                f"verl: a stage asks for the run's {name}, which verl does not give to losses and "
                "advantage estimators"
            )
        return super().__getattribute__(name)


NO_CLOCK = _NoClock()


def verl_name(slug: str) -> str:
    """`proxpo_` and the method's slug with underscores; verl's own names stay verl's."""
    return PREFIX + fold(slug)


def slug_of(name: str) -> str | None:
    """The method behind a verl name; None for a name that is not ours."""
    if not name.startswith(PREFIX):
        return None
    return {verl_name(slug): slug for slug in methods("language")}.get(name)


def known_slug(name: str) -> str | None:
    """The method behind a loss mode; None for verl's own, an error for a misspelt one of ours."""
    slug = slug_of(name)
    if slug is None and name.startswith(PREFIX):
        names = [verl_name(each) for each in methods("language")]
        raise ProxpoError(f"verl: unknown loss_mode '{name}'{nearest(name, names)}")
    return slug


def loss_recipe(
    slug: str, options: Mapping[str, Any], settings: Mapping[str, Any] | None = None
) -> Recipe:
    """Makes the recipe of a loss mode; raises ProxpoError if verl cannot compute its loss.

    settings: verl's own settings that differ from verl's defaults
    """
    return _checked(slug, _key(options), _key(settings or {}), "loss", engine_selected())


def estimator_recipe(slug: str, options: Mapping[str, Any]) -> Recipe:
    """Makes the recipe of an estimator; raises ProxpoError if verl cannot compute it."""
    return _checked(slug, _key(options), _key({}), "estimator", engine_selected())


def _key(options: Mapping[str, Any]) -> str:
    return json.dumps(as_builtins(options), sort_keys=True)


@functools.lru_cache(maxsize=64)
def _checked(slug: str, options: str, settings: str, use: str, engine: bool) -> Recipe:
    written = json.loads(options)
    recipe = make_recipe(slug, with_verl_settings(slug, written, json.loads(settings)))
    if use == "loss":
        recipe = with_own_gradients(recipe, written)
    reason = loss_refusal(recipe, engine) if use == "loss" else estimator_refusal(recipe)
    if reason:
        raise ProxpoError(reason)
    return recipe


def with_own_gradients(recipe: Recipe, written: Mapping[str, Any]) -> Recipe:
    """The recipe in the form of verl's gspo, where each token carries its own gradient.

    The same gradient where advantages and rollout weights are one number for a response; where they
    are not, that of a whole response (GSPO's eq. 5) is another one. A form that is written stays.
    """
    ratio = recipe.ratio
    if ratio.name != "sequence" or not ratio.options["normalise"] or ratio.options["own_gradient"]:
        return recipe
    if written.get("variant") == "sequence" or any(key.split(".")[0] == "ratio" for key in written):
        return recipe
    notify(
        f"{recipe.name} takes the token form of its ratio, as verl's gspo: each token carries its "
        "own gradient; policy_loss.options.ratio.own_gradient=false takes that of the response"
    )
    return recipe.replace(ratio=sequence(**{**ratio.options, "own_gradient": True}))


def loss_refusal(recipe: Recipe, engine: bool) -> str:
    """The reason why verl cannot compute this recipe's loss; empty if it can."""
    where = f"verl: {recipe.name}"
    losses = variants(recipe)
    if losses is not None and len(losses) > 1:
        return f"{where} makes {len(losses)} passes over a batch, and verl makes one"
    if recipe.schedule is not None and recipe.schedule.name != "single_update":
        return f"{where} follows schedule={recipe.schedule.name}, and verl keeps its own"
    for _, stage in recipe.stages():
        if stage.kind in UNSUPPORTED_KINDS:
            return f"{where} has {stage.kind}={stage.name}, for which verl has no place"
    if recipe.gradient is not None and not engine:
        return (
            f"{where} has gradient={recipe.gradient.name}, which needs proxpo's engine: set "
            "VERL_ENGINE_VENDOR=proxpo in every process and actor_rollout_ref.actor.strategy=fsdp2"
        )
    provided = LOSS_FIELDS | ENGINE_FIELDS.keys() if engine else LOSS_FIELDS
    return (
        _missing(recipe, LOSS_KINDS, provided, "its policy losses")
        or dry_run(recipe, provided)
        or no_estimator(recipe)
    )


def no_estimator(recipe: Recipe) -> str:
    """The reason why no estimator can give this loss its method's advantages; empty if one can.

    Values and greedy responses are known to verl's own `gae` and `remax` alone.
    """
    advantage = recipe.advantage
    if advantage is not None and advantage.name in VERL_ALONE:
        recipe = recipe.replace(advantage=None)
    reason = _missing(recipe, GROUP_KINDS, GROUP_FIELDS, "its advantage estimators")
    kinds = [kind for kind in GROUP_KINDS if getattr(recipe, kind)]
    leave = ", ".join(f"policy_loss.options.{kind}=null" for kind in kinds)
    return reason and f"{reason}; or leave that half of the method out: {leave}"


def estimator_refusal(recipe: Recipe) -> str:
    """The reason why verl cannot compute this recipe's advantages; empty if it can."""
    if recipe.advantage is None:
        return f"verl: {recipe.name} has no advantage stage"
    if recipe.advantage.name == "gae":  # its values may come from two fields, so it lists none
        return _line(recipe, recipe.advantage, "values", "its advantage estimators")
    return _missing(recipe, GROUP_KINDS, GROUP_FIELDS, "its advantage estimators")


def dry_run(recipe: Recipe, provided: set[str]) -> str:
    """The error of the loss on two made-up responses: some stages read more than they list."""
    ones = torch.ones(2, 3)
    fields = dict.fromkeys(provided - {"mask", "advantages"}, -ones)
    signs = torch.tensor([[1.0], [-1.0]]) * ones
    batch = Batch(**fields, mask=ones.bool(), advantages=signs)
    try:
        policy_loss(
            recipe.replace(aggregate=token_mean(), value=None),
            batch,
            Context(
                denominators=count(batch),
                states={},
                clock=NO_CLOCK,
                generator=torch.Generator().manual_seed(0),  # the run's draws stay as they are
            ),
        )
    except ProxpoError as reason:
        return f"verl: {recipe.name}: {str(reason).removeprefix('verl: ')}"
    return ""


def _missing(recipe: Recipe, kinds: tuple[str, ...], provided: set[str], receiver: str) -> str:
    for _, stage in recipe.stages():
        if stage.kind not in kinds:
            continue
        for name in stage.needs:
            if name not in provided:
                return _line(recipe, stage, name, receiver)
        if stage.init is not None and stage.options.get("coef") != 0:
            return (
                f"verl: {recipe.name}: {stage.kind}={stage.name} remembers earlier steps, which "
                f"verl does not keep for {receiver}"
            )
    return ""


def _line(recipe: Recipe, stage: Stage, name: str, receiver: str) -> str:
    if stage.name == "kl_in_reward":  # reads two fields, whichever is missing
        name = "ref_logp"
    fitting = name in INSTEAD and (name != "entropy" or stage.kind == "regularisers")
    instead = [INSTEAD[name]] if fitting else []
    if stage.kind in LOSS_KINDS and name in ENGINE_FIELDS:
        instead.append("proxpo's engine gives it (VERL_ENGINE_VENDOR=proxpo)")
    hint = f"; {'; or '.join(instead)}" if instead else ""
    return (
        f"verl: {recipe.name}: {stage.kind}={stage.name} needs '{name}' ({FIELDS[name].doc}), "
        f"which verl does not give to {receiver}{hint}"
    )


def as_builtins(options: Any) -> Any:
    """Options as dicts, lists and scalars, without OmegaConf's containers."""
    if isinstance(options, Mapping):
        return {str(key): as_builtins(value) for key, value in options.items()}
    if isinstance(options, (str, int, float, bool, type(None))):
        return options
    return [as_builtins(value) for value in options]


__all__ = [
    "ENGINE_FIELDS",
    "GROUP_KINDS",
    "LOSS_KINDS",
    "NO_CLOCK",
    "PREFIX",
    "VERL_ALONE",
    "as_builtins",
    "estimator_recipe",
    "estimator_refusal",
    "known_slug",
    "loss_recipe",
    "loss_refusal",
    "missing_field",
    "needed_fields",
    "no_estimator",
    "slug_of",
    "verl_name",
]
