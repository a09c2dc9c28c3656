"""Stages of all families thrown together: whatever fits trains, and its state survives a disk."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from train.train_runs import SMALL

from proxpo.errors import ProxpoError
from proxpo.recipes import methods
from proxpo.runs.checkpoint import load_latest, save_checkpoint
from proxpo.settings import make_recipe
from proxpo.stages import STAGES, load_stages
from proxpo.train.config import load_config
from proxpo.train.language import _learner, build_language_job
from proxpo.train.refusals import check_fields
from proxpo.train.update import update
from proxpo.types import MANY

COUNT = 30
SEED = 70  # of a draw that reaches every gradient transform and both losses on whole responses
SWAPPED = ("advantage", "trust", "ratio", "aggregate", "gradient", "schedule")
ADDED = ("budget", "reward", "filter", "prune", "weights", "regularisers", "select")
TINY = ["prompts_per_step=2", "samples_per_prompt=3", "task=calculator", "micro_batch=4"]
# Options without a default, and bounds where the defaults are made for real runs.
NEEDED = {
    "kl_from_old": {"coef": 0.01},
    "line_search": {"cg_iterations": 2, "searches": 2},
    "fixup": {"max_passes": 2},
    "inner_steps": {"steps": 2},
}
CHEAPER = {
    "mdpo": {"updates": 2},
    "rapid": {"horizon": 2},
    "fixpo": {"max_fixup_passes": 2},
    "trpo": {"cg_iterations": 2, "searches": 2},
}


def drawn(draw: random.Random) -> tuple[str, dict]:
    """A method, up to two of its stages replaced and up to two added."""
    settings: dict = {}
    for kind in draw.sample(SWAPPED, draw.randint(0, 2)):
        settings[kind] = _stage(draw, kind)
    for kind in draw.sample(ADDED, draw.randint(0, 2)):
        settings[f"{kind}+"] = _stage(draw, kind)
    slug = draw.choice(sorted(s for s, m in methods("language").items() if _ours(m.make)))
    return slug, CHEAPER.get(slug, {}) | settings


def _stage(draw: random.Random, kind: str) -> dict:
    name = draw.choice(sorted(name for name, make in STAGES[kind].items() if _ours(make)))
    return {"name": name, **NEEDED.get(name, {})}


def _ours(make: Callable) -> bool:
    """False for what another test of this process has registered."""
    return make.__module__.startswith("proxpo.")


def legal(task, count: int) -> list[tuple[str, dict]]:
    """The first combinations that the library itself accepts for this task."""
    load_stages()
    draw, found = random.Random(SEED), []
    while len(found) < count:
        slug, settings = drawn(draw)
        try:
            check_fields(make_recipe(slug, settings), task)
        except ProxpoError:
            continue
        found.append((slug, settings))
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("combinations")
    return build_language_job(
        load_config(None, [*SMALL, *TINY, "method=grpo"], overrides={"out": str(out)})
    )


@pytest.mark.long
def test_random_combinations_train_and_survive_a_checkpoint(base, tmp_path) -> None:
    start = {k: v.clone() for k, v in base.policy.model.state_dict().items()}
    refused: list[str] = []
    for number, (slug, settings) in enumerate(legal(base.task, COUNT)):
        base.policy.model.load_state_dict(start)
        job = _job(base, slug, settings)
        what = f"{slug} {settings}"
        try:
            _step(job, what)
            save_checkpoint(root := tmp_path / str(number), 1, _memory(job), {})
            parts = load_latest(root).parts
            _same(parts, _memory(job), what)
            _remember(job, parts)
            _step(job, what)
        except ProxpoError as error:  # a fit that only data can tell, in one clear line
            refused.append(str(error))
    assert len(refused) <= COUNT // 5, refused
    assert not any("\n" in line for line in refused)


def _step(job, what: str) -> None:
    metrics = update(job, job.collect(job.step).experience)
    job.step += 1
    assert torch.isfinite(torch.tensor(metrics["loss"])), what
    assert all(bool(torch.isfinite(p).all()) for p in job.learner.trainable()), what


def _job(base, slug: str, settings: dict):
    """The shared model under another recipe, with an optimizer of its own."""
    config = replace(base.config, method=slug, recipe=settings)
    recipe = make_recipe(slug, settings)
    learner = _learner(config, base.policy, recipe, base.initial, longest=config.rollout.max_tokens)
    return replace(base, config=config, learner=learner, step=0, past=[], waiting=[])


def _memory(job) -> dict:
    """What a recipe and a transform remember from one step to the next."""
    transform = job.learner.transform
    return {
        "recipe": job.learner.state,
        "transform": transform.state_dict() if transform is not None else {},
    }


def _remember(job, parts: dict) -> None:
    """Into a learner that has seen nothing."""
    job.learner.state = parts["recipe"]
    if job.learner.transform is not None:
        job.learner.transform = job.learner.recipe.gradient.apply()
        job.learner.transform.load_state_dict(parts["transform"])


def _same(found, expected, what: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for name, value in expected.items():
            _same(found[name], value, f"{what}: {name}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), what
    else:
        assert found == expected, what


def test_the_combinations_cross_families(base) -> None:
    """No few stages stand for all: the draw reaches most kinds and many methods."""
    chosen = legal(base.task, COUNT)
    assert len({slug for slug, _ in chosen}) > COUNT // 3
    kinds = {kind.rstrip("+") for _, settings in chosen for kind in settings}
    assert len(kinds) >= 10
    assert {"budget", "prune", "schedule", "gradient"} <= kinds
    made = [make_recipe(slug, settings) for slug, settings in chosen]
    transformed = {recipe.gradient.name for recipe in made if recipe.gradient is not None}
    assert transformed == {name for name, make in STAGES["gradient"].items() if _ours(make)}
    assert {recipe.name for recipe in made if recipe.trust.gives == "log_ratio"} == {"dpo", "pacs"}
    assert set(ADDED) <= set(MANY)
