"""The loop of own_loop.py inside `transformers.Trainer`: the recipe's loss is its custom loss.

    python examples/transformers_trainer.py

Trainer fetches the next rows before a step is done, so responses are drawn when the step begins,
not by the data loader. A gradient transform stays open until Trainer's backward pass is done.
"""

import tempfile
from contextlib import ExitStack
from functools import partial

import torch
from own_loop import LR, METHOD, PROBLEMS, STEPS, UPDATES, sample
from transformers import Trainer, TrainingArguments

import proxpo
from proxpo.models import load_policy
from proxpo.sampler import make_sampler


class Learner(Trainer):
    def __init__(self, policy, **options):
        super().__init__(policy.model, **options)
        parts = self.args.gradient_accumulation_steps * self.args.world_size
        if parts > 1 or self.args.train_batch_size < len(PROBLEMS) or self.args.fp16:
            raise SystemExit("a step is one batch with all of PROBLEMS here, its loss not scaled")
        self.policy, self.sampler = policy, make_sampler("local", policy)
        self.recipe = proxpo.make_recipe(METHOD)
        self.transform = self.recipe.gradient.apply() if self.recipe.gradient else None

    def training_step(self, model, inputs, num_items_in_batch=None):
        rollout, update = divmod(self.state.global_step, UPDATES)
        if update == 0:
            self.draw(rollout, sorted(inputs["rows"].tolist()))
        with ExitStack() as self.opened:
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.transform:
            self.transform.step()
        return loss

    def draw(self, rollout, rows):
        """Responses to these problems by the present weights."""
        self.sampler.sync()
        seeds = [rollout * len(PROBLEMS) + row for row in rows]
        problems = [PROBLEMS[row] for row in rows]
        (self.ids, self.attended), batch = sample(self.policy, self.sampler, problems, seeds)
        self.batch, self.ctx, _ = proxpo.prepare(self.recipe, batch)
        print(f"step {rollout + 1}: reward {batch.rewards.mean():.3f}", flush=True)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        rows = torch.arange(len(self.ids), device=self.ids.device)[:, None].where(self.attended, -1)
        step = proxpo.backward_pass(
            self.recipe,
            self.batch,
            self.ctx,
            forward=partial(
                proxpo.model_logp, model, self.ids, self.batch.mask, attention_mask=self.attended
            ),
            applied=self.transform and partial(self.transform.applied, model, sequences=rows),
        )
        return self.opened.enter_context(step).objective


def main():
    policy = load_policy("tiny")
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=LR, weight_decay=0.0)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=STEPS * UPDATES,
            per_device_train_batch_size=len(PROBLEMS),
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            remove_unused_columns=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Learner(
            policy,
            args=args,
            train_dataset=range(len(PROBLEMS)),
            data_collator=lambda rows: {"rows": torch.tensor(rows)},
            optimizers=(optimizer, None),
        ).train()


if __name__ == "__main__":
    main()
