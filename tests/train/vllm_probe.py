"""Run by test_rollouts.py in vLLM's environment: prints what was found as one line of JSON.

Five steps of `proxpo train` with vLLM as the sampler. Around every hand-over of weights its
log-probabilities are compared with the trainer's, of before and after the step.
"""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from proxpo.errors import ProxpoError
from proxpo.sampler import agreement, make_sampler
from proxpo.train import loop
from proxpo.train.config import load_config
from proxpo.train.language import LanguageJob as Job

STEPS = 5
SETTINGS = [
    *("rollout.backend=vllm", "rollout.options.memory=1", "rollout.options.max_rows=16"),
    *("prompts_per_step=4", "samples_per_prompt=4", f"steps={STEPS}", "lr=1e-3"),
    *("evaluate.every=0", "evaluate.size=4", "evaluate.k=2", "checkpoint.every=0"),
]


class Watched:
    """The job's sampler, looked at whenever it is given new weights."""

    def __init__(self, job: Job) -> None:
        self._job, self._sampler = job, job.sampler
        self.context = job.sampler.context
        self._old = copy.deepcopy(job.policy.model)
        problems = job.task.test[:12]
        self.prompts = [job.task.encode(one, job.policy.tokenizer) for one in problems]
        self.start, self.steps = self.gap(), list[dict[str, float]]()

    def gap(self, temperature: float = 1.0, model: Any = None) -> float:
        policy = self._job.policy if model is None else replace(self._job.policy, model=model)
        options = {"max_tokens": 6, "temperature": temperature}
        return agreement(policy, self._sampler, self.prompts, **options).largest

    def sync(self) -> None:
        before, stale = self.gap(model=self._old), self.gap()
        self._sampler.sync()
        self.steps.append({"before": before, "stale": stale, "synced": self.gap()})
        self._old = copy.deepcopy(self._job.policy.model)

    def sample(self, *given: Any, **options: Any) -> Any:
        return self._sampler.sample(*given, **options)

    def close(self) -> None:
        self.found = self.last_look()
        self._sampler.close()

    def last_look(self) -> dict[str, object]:
        """What does not depend on the step: other temperatures, greedy, seeds, refusals."""
        found: dict[str, object] = {"cool": self.gap(0.7)}
        options: dict[str, Any] = {"seeds": list(range(len(self.prompts))), "max_tokens": 6}
        local = make_sampler("local", self._job.policy)
        greedy = [one.sample(self.prompts, temperature=0.0, **options) for one in (local, self)]
        found["greedy_is_that_of_local"] = torch.equal(greedy[0].tokens, greedy[1].tokens)
        one, two = (self.sample(self.prompts, temperature=1.0, **options) for _ in range(2))
        found["same_seeds_same_tokens"] = torch.equal(one.tokens, two.tokens)
        try:
            self.sample(self.prompts, temperature=1.0, top_p=0.9, **options)
        except ProxpoError as error:
            found["top_p"] = str(error)
        engine = self._sampler._llm.llm_engine.engine_core
        engine.get_output = self._die
        try:
            self.sample(self.prompts, temperature=1.0, **options)
        except ProxpoError as error:
            found["dead"] = str(error)
        return found

    def _die(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")


def main(out: str) -> None:
    build, jobs = loop.build_job, list[Job]()

    def watched(config: Any) -> Job:
        jobs.append(build(config))
        jobs[0].sampler = Watched(jobs[0])
        return jobs[0]

    loop.build_job = watched
    config = load_config("quickstart", SETTINGS, overrides={"out": out})
    summary = loop.train(config)
    seen: Any = jobs[0].sampler
    found = {"start": seen.start, "steps": seen.steps, **seen.found, "trained": summary["steps"]}
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    found["logged"] = [row["proxpo/sampler_gap"] for row in rows if "proxpo/sampler_gap" in row]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
