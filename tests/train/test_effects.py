"""Every setting of a run does something: each is changed, and the run is another one.

Settings of sampling and updates are watched on two rollouts and their updates, those of evaluation,
checkpoints and logs in what a run writes. A setting that no test here or elsewhere names fails.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from train.train_runs import job_of, rows_of, sample

from proxpo.batch_file import saved_steps
from proxpo.errors import ProxpoError
from proxpo.models import recomputes_layers
from proxpo.train.config import explain, load_config
from proxpo.train.language import LanguageJob as Job
from proxpo.train.loop import train
from proxpo.train.refusals import remarks
from proxpo.train.update import update

pytestmark = pytest.mark.long
TINY = [
    "prompts_per_step=4",
    "samples_per_prompt=2",
    "rollout.max_tokens=4",
    "max_prompt=16",
    "evaluate.size=2",
    "evaluate.k=0",
    "train.lr=1e-3",
    "train.steps=4",
    "log.pictures=false",
]

# Settings that show in a rollout or its updates: what is set, after what holds in both runs.
UPDATES: dict[str, tuple[list[str], list[str]]] = {
    "seed": (["seed=1"], []),
    "method": (["method=reinforce"], []),
    "recipe": (["recipe.clip_high=0.001", "recipe.clip_low=0.001"], ["updates_per_rollout=2"]),
    "model.dtype": (["model.dtype=float64"], []),
    "model.lora": (["model.lora.r=2"], []),
    "task.name": (["task.name=calculator"], ["max_prompt=64"]),
    "task.options": (["task.options.digits=1"], []),
    "rollout.prompts_per_step": (["prompts_per_step=2"], []),
    "rollout.samples_per_prompt": (["samples_per_prompt=3"], []),
    "rollout.max_tokens": (["rollout.max_tokens=2"], []),
    "rollout.temperature": (["temperature=0.5"], []),
    "rollout.top_p": (["top_p=0.3"], []),
    "rollout.thoughts": (["thoughts=2"], []),
    "train.steps": (["train.steps=9"], ["lr_schedule=linear"]),
    "train.updates_per_rollout": (["updates_per_rollout=2"], []),
    "train.mini_batches": (["mini_batches=2"], []),
    "train.micro_batch": (["micro_batch=3"], ["method=proma"]),
    "train.optimizer": (["optimizer=muon"], []),
    "train.optimizer_options": (["train.optimizer_options.eps=0.1"], []),
    "train.lr": (["train.lr=1e-2"], []),
    "train.weight_decay": (["weight_decay=0.5"], []),
    "train.grad_clip": (["grad_clip=1e-4"], []),
    "train.lr_schedule": (["lr_schedule=cosine"], []),
    "train.warmup_steps": (["warmup_steps=5"], []),
    "train.train_temperature": (["train_temperature=0.5"], []),
    "train.replay_share": (["replay_share=0.5"], []),
}
# Settings with a refusal or an effect that another test of the trainer has seen.
FAILED_REWARDS = "test_reward_faults.py::test_over_half_failed_stops_with_the_commonest_reason"
TIMED_OUT = "test_reward_faults.py::test_a_timed_out_function_takes_its_children_along"
OVER_MEMORY = "test_reward_faults.py::test_a_worker_over_its_memory_limit_costs_its_sample_alone"
GIVEN_UP = "test_resume.py::test_an_update_that_does_not_end_is_given_up_after_the_grace"
ELSEWHERE = {
    "task.reward": FAILED_REWARDS,
    "task.reward_max_failed": FAILED_REWARDS,
    "task.reward_timeout": TIMED_OUT,
    "task.reward_memory": OVER_MEMORY,
    "task.problems": "test_budget.py::test_a_method_that_learns_from_revisits_gets_a_pool",
    "task.correct_above": "test_run_words.py::test_what_is_right_can_be_set",
    "checkpoint.grace": GIVEN_UP,
    "task.drop_long": "test_tasks.py::test_long_prompts",
    "rollout.max_prompt": "test_tasks.py::test_long_prompts",
    "rollout.backend": "test_rollouts.py::test_vllm_samples_the_policy_and_follows_its_weights",
    "rollout.options": "test_rollouts.py::test_unknown_names_and_options_get_the_nearest",
    "train.on_no_signal": "test_learning_signal.py::test_a_warning_is_enough_where_that_is_set",
    "train.graphs": "test_graphs.py::test_what_cannot_be_recorded_is_refused",
    "model.options": "test_config.py::test_a_setting_that_the_domain_does_not_read",
    "model.device": "test_policies.py::test_devices_and_precisions_that_cannot_be",
    "log.sinks": "test_sinks.py::test_missing_and_unknown_sinks",
    "log.project": "test_sinks.py::test_trackers_are_called_as_they_expect",
}
WRITTEN = {  # by test_what_a_run_writes_follows_its_settings
    *("evaluate.every", "evaluate.size", "evaluate.k", "checkpoint.every", "checkpoint.keep"),
    *("log.samples", "log.batch_every", "log.pictures", "out", "train.off_policy_lag"),
}
BUILT = {"model.name", "model.gradient_checkpointing", "task.reward_workers"}


def test_every_setting_is_watched_somewhere() -> None:
    groups = (UPDATES, ELSEWHERE, WRITTEN, BUILT)
    assert sorted(path for group in groups for path in group) == sorted(
        one.path for one in explain()
    )
    for place in ELSEWHERE.values():
        file, name = place.split("::")
        text = next(Path(__file__).parents[1].rglob(file)).read_text()
        assert re.search(rf"^def {name}\(", text, flags=re.MULTILINE), place


def outcome(job: Job) -> list[Any]:
    """Two rollouts, the metrics of their updates, the rate and the weights at the end."""
    seen: list[Any] = []
    for _ in range(2):
        drawn = sample(job)
        rows = drawn.experience
        seen += [rows.input_ids.tolist(), rows.rollout_logp.tolist(), update(job, rows)]
        job.sampler.sync()
        job.step += 1
    seen.append(job.learner.optimizer.param_groups[0]["lr"])
    return [*seen, *(repr(p.double().sum().item()) for p in job.learner.trainable())]


@pytest.mark.parametrize("path", UPDATES)
def test_a_setting_changes_the_rollout_or_its_updates(path: str, tmp_path: Path) -> None:
    changed, holds = UPDATES[path]
    found = []
    for number, sets in enumerate((holds, holds, [*holds, *changed])):
        job = job_of(tmp_path / str(number), *TINY, "method=grpo", *sets)
        found.append(outcome(job))
        job.close()
    assert found[0] == found[1]  # nothing else differs between two runs
    assert found[0] != found[2]


def test_what_a_run_writes_follows_its_settings(tmp_path: Path) -> None:
    runs = {}
    sets = {
        "plain": ["evaluate.every=0", "checkpoint.every=0", "log.samples=0", "log.pictures=true"],
        "other": ["evaluate.every=1", "evaluate.size=3", "evaluate.k=2", "log.samples=7"],
        "lagged": ["evaluate.every=0", "off_policy_lag=1"],
        "saved": ["evaluate.every=0", "log.batch_every=2"],
    }
    sets["all"] = ["evaluate.every=0", "log.samples=8"]
    sets["other"] += ["checkpoint.every=1", "checkpoint.keep=1"]
    for name, chosen in sets.items():
        out = tmp_path / name
        train(load_config(None, [*TINY, "method=grpo", *chosen], overrides={"out": str(out)}))
        samples = (out / "samples.jsonl").read_text().splitlines()
        kept = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
        runs[name] = rows_of(out), samples, kept
    plain, other, lagged, saved, whole = (runs[name] for name in sets)
    for row in whole[0][1:]:
        drawn = [line for line in map(json.loads, whole[1]) if line["step"] == row["step"]]
        assert row["reward"] == sum(line["reward"] for line in drawn) / 8
    assert list(saved_steps(tmp_path / "saved")) == [2, 4]
    assert not saved_steps(tmp_path / "plain")
    pictured = {path.parent.name for path in tmp_path.glob("*/curves.png")}
    assert pictured == {path.parent.name for path in tmp_path.glob("*/report.html")} == {"plain"}
    assert [row.get("loss") for row in saved[0]] == [row.get("loss") for row in plain[0]]
    evaluated = ["proxpo/eval/accuracy" in row for row in plain[0]]
    assert evaluated == [True, False, False, False, True]
    assert all("proxpo/eval/accuracy" in row for row in other[0])
    thirds = {round(3 * row["proxpo/eval/accuracy"], 4) for row in other[0]}
    assert thirds <= {0.0, 1.0, 2.0, 3.0}  # of three problems
    assert other[0][0].keys() - plain[0][0].keys()  # pass@k
    assert (len(plain[1]), len(other[1]), len(lagged[1])) == (0, 4 * 7, 5 * 4)
    assert plain[2] == ["step-4"]
    assert other[2] == ["step-4"]
    rewards = [[row.get("loss") for row in run[0]] for run in (plain, lagged)]
    assert rewards[0] != rewards[1]


def test_what_a_job_is_built_of_follows_its_settings(tmp_path: Path) -> None:
    job = job_of(tmp_path, *TINY, "gradient_checkpointing=true", "reward_workers=1")
    assert recomputes_layers(job.policy.model)
    assert job.pool._size == 1
    with pytest.raises(ProxpoError, match="model"):
        job_of(tmp_path, *TINY, "model.name=/nowhere")
    other = job_of(tmp_path, *TINY)
    assert not recomputes_layers(other.policy.model)
    assert other.pool._size == 2
    for one in (job, other):
        one.close()


def test_a_seed_of_the_transform_reaches_it(tmp_path: Path) -> None:
    jobs = [
        job_of(tmp_path, *TINY, "method=isopo", f"gradient.seed={seed}") for seed in (0, 1, 1, 2)
    ]
    seeds = [job.learner.transform.seed for job in jobs]
    assert seeds[1] == seeds[2]
    assert len(set(seeds)) == 3
    for job in jobs:
        job.close()


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        *((slug, "updates_per_rollout=3") for slug in ("opo", "mdpo", "rapid", "sfpo", "trpo")),
        *((slug, "mini_batches=2") for slug in ("opo", "mdpo", "rapid", "sfpo", "trpo", "remax")),
        *((slug, "updates_per_rollout=2") for slug in ("remix", "remax")),
        *(("trpo", one) for one in ("lr=1e-3", "optimizer=muon", "grad_clip=2", "warmup_steps=3")),
        ("trpo", "train.optimizer_options.eps=0.1"),
        *(("trpo", one) for one in ("aggregate=prompt_mean", "trust=ess_cap", "weights+=tis")),
    ],
)
def test_updates_that_a_schedule_decides_cannot_be_set(method: str, setting: str) -> None:
    """Refused where they are written for the run; in a file that methods share, the run says so."""
    with pytest.raises(
        ProxpoError, match=rf"{method}: (train|recipe)\.\S+=.* has no effect, since schedule="
    ):
        load_config(None, [f"method={method}", setting])
    config = load_config("comparison", [f"method={method}"])
    said = " ".join(remarks(config, config.make_recipe()))
    assert ("train.mini_batches=2 has no effect" in said) == (method != "remix")
    load_config(None, [f"method={method}", setting, "schedule=none"])
    load_config(None, ["method=grpo", setting])
    load_config(None, ["method=trpo", "trust=unclipped", "average=sequence"])


def test_mini_batches_of_remix_are_its_passes_parts(tmp_path: Path) -> None:
    job = job_of(tmp_path, *TINY, "method=remix", "mini_batches=2", "passes=3")
    update(job, sample(job).experience)
    assert job.learner.version == 6
    job.close()


def drawn(tmp_path: Path, *sets: str) -> tuple[int, int, list[int]]:
    """Rounds, responses sampled and prompts kept of one rollout."""
    job = job_of(tmp_path, *TINY, "method=dapo", "samples_per_prompt=3", *sets)
    found = sample(job)
    job.close()
    kept = found.experience.group
    return (
        int(found.metrics["proxpo/rounds"]),
        int(found.metrics["proxpo/samples"]),
        kept.unique_consecutive(return_counts=True)[1].tolist(),
    )


def test_prompts_are_drawn_in_the_rounds_and_numbers_asked_for(tmp_path: Path) -> None:
    """Each round draws generation_factor times what is missing; a surplus is not trained on."""
    rounds, samples, kept = drawn(tmp_path / "a")
    assert rounds > 1
    assert kept == [3] * 4
    assert samples > 12
    once, more, still = drawn(tmp_path / "b", "prompts.generation_factor=20")
    assert (once, more, still) == (1, 3 * 4 * 20, [3] * 4)
    one, few, some = drawn(tmp_path / "c", "prompts.max_rounds=1", "prompts_per_step=8")
    assert (one, few) == (1, 24)
    assert 0 < len(some) < 8
    for wrong in ("prompts.generation_factor=0", "prompts.max_rounds=0"):
        with pytest.raises(ProxpoError, match="are at least 1"):
            load_config(None, ["method=dapo", wrong])


def test_replay_waits_for_its_start_and_takes_its_batch(tmp_path: Path) -> None:
    """Two rollouts of 8 responses are kept before the third; 1.5 times 4 prompts are replayed."""

    def replayed(*sets: str) -> list[float]:
        job = job_of(tmp_path, *TINY, "method=p3o-2019", "replay_ratio=3", *sets)
        counts = []
        for _ in range(3):
            counts.append(update(job, sample(job).experience)["schedule/replayed"])
            job.sampler.sync()
            job.step += 1
        job.close()
        return counts

    early, late = replayed(), replayed("schedule.start=16")
    assert early[0] == 0
    assert early[1] > 0
    assert late[:2] == [0, 0]
    assert late[2] == early[2] > 0
    assert replayed("schedule.batch=1.5") == early


def test_lengths_come_from_the_run(tmp_path: Path) -> None:
    """dr-grpo divides by the longest response of the run, in turns where there are any."""
    for task, turns in (("arithmetic", 1), ("calculator", 3)):
        job = job_of(tmp_path, *TINY, "method=dr-grpo", f"task.name={task}", "max_prompt=64")
        assert job.task.max_turns in (1, turns)
        assert job.learner.recipe.aggregate.options["max_tokens"] == 4 * job.task.max_turns
        lines = remarks(job.config, job.learner.recipe)
        longest = 4 * job.task.max_turns
        assert lines == [f"dr-grpo: aggregate.max_tokens={longest}, from rollout.max_tokens"]
        job.close()
    own = job_of(tmp_path, *TINY, "method=dr-grpo", "recipe.max_tokens=50")
    assert own.learner.recipe.aggregate.options["max_tokens"] == 50
    assert remarks(own.config, own.learner.recipe) == []
    own.close()


def test_dapo_penalises_what_this_run_calls_long(tmp_path: Path) -> None:
    job = job_of(tmp_path, *TINY, "method=dapo", "prompts=none")
    assert update(job, sample(job).experience)["reward/overlong"] > 0
    job.close()
