"""The job of Adjoint Sampling: end points into a buffer, then many updates on draws from it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from proxpo.errors import ProxpoError
from proxpo.generative.adjoint import Ends, NoiseSchedule, adjoint_loss, simulate, target
from proxpo.generative.energies import Energy, make_energy
from proxpo.generative.networks import TimeField, descend, zero_at_start
from proxpo.generative.results import result, samples_figure
from proxpo.ops.shapes import Float, Tensor
from proxpo.ops.streams import derive, generator
from proxpo.train.config import Config
from proxpo.train.job import Examined, Job, StepWatch
from proxpo.train.observer import Observer


class ControlField(nn.Module):
    """u(x, t) = g(t)·s(x, t), s a network that is 0 at the start."""

    def __init__(self, size: int, schedule: NoiseSchedule, *, hidden: int) -> None:
        super().__init__()
        self.schedule = schedule
        self.score = zero_at_start(TimeField(size, size, hidden=hidden))

    def forward(self, x: Float[Tensor, "row size"], t: Float[Tensor, " row"]) -> Tensor:
        return self.schedule.g(t)[:, None] * self.score(x, t)


@dataclass(kw_only=True)
class AdjointJob(Job):
    """A control, the end points it has made, and their energies' gradients."""

    options: Mapping[str, Any]
    energy: Energy
    schedule: NoiseSchedule
    control: ControlField
    buffer: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (X_1, s*), a round each

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.control.parameters(), lr=self.options["control_lr"])

    @property
    def dtype(self) -> torch.dtype:
        return self.control.score.leave.weight.dtype

    def make_step(self, watch: StepWatch) -> dict[str, float]:
        """New end points into the buffer, then updates on draws from it."""
        watch.enter("rollout")
        options, draws = self.options, generator(self.config.seed, "adjoint", self.step)
        ends = self._simulate(
            self.control if self.buffer else None,
            options["samples_per_step"],
            draws,
            lambda done, total: watch.observer.on_progress("sampling", done, total),
        )
        gradient = self.energy.gradient(ends.x) / options["temperature"]
        s = target(ends.x, gradient, self.schedule.nu_end, max_norm=options["max_norm"])
        clipped = float((s.norm(dim=1) >= options["max_norm"] * (1 - 1e-6)).double().mean())
        watch.lap("rollout")
        watch.enter("update")
        self.buffer = [*self.buffer, (ends.x, s)][-options["buffer"] :]
        losses, norm = self._updates(draws)
        watch.lap("update")
        self.step += 1
        with torch.no_grad():
            energy = self.energy(ends.x).mean()
        return {
            "reward": -float(energy),
            "loss": sum(losses) / len(losses),
            "grad_norm": norm,
            "proxpo/adjoint/clipped": clipped,
            "proxpo/adjoint/buffer": float(sum(len(x) for x, _ in self.buffer)),
            "num_tokens": self.step * options["samples_per_step"],
        }

    def _simulate(
        self,
        control: ControlField | None,
        rows: int,
        draws: torch.Generator,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Ends:
        return simulate(
            control,
            self.schedule,
            rows=rows,
            size=self.energy.size,
            steps=self.config.rollout.max_tokens,
            draws=draws,
            dtype=self.dtype,
            progress=progress,
        )

    def _updates(self, draws: torch.Generator) -> tuple[list[float], float]:
        """The losses of this round's updates, and the last gradient's norm."""
        end, s = (torch.cat(parts) for parts in zip(*self.buffer))
        losses, norm = [], 0.0
        for _ in range(self.options["batches"]):
            index = torch.randint(len(end), (self.options["batch"],), generator=draws)
            loss = adjoint_loss(self.control, self.schedule, end[index], s[index], draws)
            norm = descend(self.optimizer, loss)
            losses.append(float(loss.detach()))
        return losses, norm

    # --- evaluation and checkpoints

    def _exam(self, control: ControlField | None) -> Ends:
        return self._simulate(control, self.config.evaluate.size, generator(0, "exam"))

    def examine(self, observer: Observer) -> Examined:
        """Moments of the samples, and the bound E[-cost - E - log p_base] on log Z."""
        observer.on_progress("evaluating", 0, 1)
        ends = self._exam(self.control)
        with torch.no_grad():
            energy = self.energy(ends.x) / self.options["temperature"]
        nu = self.schedule.nu_end
        base = -ends.x.square().sum(1) / (2 * nu) - self.energy.size / 2 * math.log(
            2 * math.pi * nu
        )
        bound = float((-ends.cost - energy - base).mean())
        metrics = {"eval/reward": bound, "eval/energy": float(energy.mean())}
        for name, values in (("mean", ends.x.mean(0)), ("std", ends.x.std(0))):
            metrics |= {f"eval/{name}_{i}": float(v) for i, v in enumerate(values[:3])}
        shown = [
            {
                "prompt": f"sample {i}",
                "completion": ", ".join(f"{float(c):.3f}" for c in row[:4]),
                "answer": "",
            }
            for i, row in enumerate(ends.x[:8])
        ]
        return metrics, shown

    def figure(self) -> Any:
        pairs = [("before", self._exam(None).x), ("after", self._exam(self.control).x)]
        return samples_figure(pairs)

    def closing_notes(self, rows: list[dict[str, Any]]) -> list[str]:
        known = self.energy.log_z
        if known is None or self.options["temperature"] != 1.0:
            return []
        return [f"adjoint-sampling: log Z is {known:.3f}, which the score approaches from below"]

    def parts(self) -> dict[str, Any]:
        return {
            "weights": dict(self.control.named_parameters()),
            "optimizer": self.optimizer.state_dict(),
            "buffer": [list(pair) for pair in self.buffer],
        }

    def load(self, parts: dict[str, Any], info: dict[str, Any]) -> None:
        self.control.load_state_dict(parts["weights"])
        self.optimizer.load_state_dict(parts["optimizer"])
        self.buffer = [(x, s) for x, s in parts["buffer"]]

    def result(self, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
        return result(
            before,
            after,
            score="lower bound on log Z",
            unit="samples",
            count=self.step * self.options["samples_per_step"],
            seconds=self.seconds,
        )


def build_adjoint_job(config: Config, options: Mapping[str, Any], dtype: torch.dtype) -> AdjointJob:
    """The job of a task energy:NAME."""
    if options["noise"] == "geometric" and not options["sigma_max"] > options["sigma_min"]:
        raise ProxpoError(
            f"adjoint-sampling: sigma_max={options['sigma_max']:g} must be above "
            f"sigma_min={options['sigma_min']:g}"
        )
    energy = make_energy(config.task.name.partition(":")[2], config.task.options)
    schedule = NoiseSchedule(options["noise"], options["sigma_min"], options["sigma_max"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "control"))
        control = ControlField(energy.size, schedule, hidden=options["hidden"]).to(dtype)
    return AdjointJob(
        config=config, options=options, energy=energy, schedule=schedule, control=control
    )


__all__ = ["AdjointJob", "ControlField", "build_adjoint_job"]
