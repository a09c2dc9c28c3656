"""The loop of own_loop.py inside PyTorch Lightning: a module that samples and optimizes by hand.

    python examples/lightning_loop.py

Lightning's own order (loss, then backward, then step) has no place for a gradient transform, which
is open around the backward pass, nor for a rollout: `automatic_optimization` is off.
"""

import lightning.pytorch as lightning
import torch
from own_loop import LR, METHOD, PROBLEMS, STEPS, UPDATES, backward, sample
from torch.utils.data import DataLoader

import proxpo
from proxpo.models import load_policy
from proxpo.sampler import make_sampler


class Learner(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.policy, self.recipe = load_policy("tiny"), proxpo.make_recipe(METHOD)
        self.model, self.sampler = self.policy.model, make_sampler("local", self.policy)
        self.transform = self.recipe.gradient.apply() if self.recipe.gradient else None

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)

    def on_fit_start(self):
        if self.trainer.world_size > 1 or self.trainer.precision == "16-mixed":
            raise SystemExit("one process without a scaled loss; several: accelerate_loop.py")

    def training_step(self, _):
        self.sampler.sync()  # it has its own copy of the weights, also of a checkpoint's
        step = self.global_step // UPDATES
        seeds = [step * len(PROBLEMS) + row for row in range(len(PROBLEMS))]
        (ids, attended), batch = sample(self.policy, self.sampler, PROBLEMS, seeds)
        batch, ctx, _ = proxpo.prepare(self.recipe, batch)
        optimizer = self.optimizers()
        for _ in range(UPDATES):
            cut = (ids, attended, batch, ctx)
            backward(self.model, self.recipe, self.transform, *cut, self.manual_backward)
            optimizer.step()
            optimizer.zero_grad()
            if self.transform:
                self.transform.step()
        self.log("reward", batch.rewards.mean())
        self.print(f"step {step + 1}: reward {batch.rewards.mean():.3f}", flush=True)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["transform"] = self.transform.state_dict() if self.transform else None

    def on_load_checkpoint(self, checkpoint):
        if self.transform:
            self.transform.load_state_dict(checkpoint["transform"])


def main():
    trainer = lightning.Trainer(
        max_epochs=1,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Learner(), DataLoader(range(STEPS), batch_size=None))


if __name__ == "__main__":
    main()
