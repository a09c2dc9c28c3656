"""All optimizer steps on one rollout: the recipe's schedule decides, `Steps` makes them."""

from proxpo.ops.streams import generator
from proxpo.stages.schedule import Updates
from proxpo.train.experience import Experience
from proxpo.train.job import Job
from proxpo.train.replay import remembered, replaced
from proxpo.train.steps import Steps
from proxpo.types import Context, Metrics, State


def update(job: Job, fresh: Experience) -> dict[str, float]:
    """The steps a rollout gets; their mean metrics, and what the schedule has to say."""
    config, learner = job.config, job.learner
    share = config.train.replay_share
    rows = replaced(fresh, job.past, share, generator(config.seed, "mix", job.step))
    steps = Steps(job, rows, path=("update", job.step))
    stage = learner.recipe.schedule
    ctx = Context(
        state=learner.state.get("schedule", {}),
        generator=generator(config.seed, "replay", job.step),
        clock=job.clock,
    )
    state, said = (stage.apply if stage is not None else as_configured)(steps, ctx)
    steps.finish(state)
    samples = max(steps.room["samples"], 4 * len(fresh.mask) if share else 0)
    job.past = remembered(job.past, fresh, samples=samples, rollouts=steps.room["rollouts"])
    means = {name: sum(values) / len(values) for name, values in steps.record.seen.items()}
    return means | {name: float(value) for name, value in said.items()}


def as_configured(updates: Updates, ctx: Context) -> tuple[State, Metrics]:
    """Without a schedule: as many steps as the settings ask for."""
    updates.step(updates.count, only=True)
    return {}, {}


__all__ = ["update"]
