"""A run that is killed after a checkpoint, at a step of its own choosing."""

import os
import signal
import sys
from typing import Any

import torch
from transformers import TrainerCallback
from trl_runs import plain_layers, trainer

# Both kinds of memory: an adaptive KL coefficient, and the trailing averages of a transform.
RECIPE = (
    "rloo",
    {
        "kl_coef": 0.05,
        "reward.kl_in_reward.controller": "doubling",
        "gradient": "isopo",
        "gradient.reg": 1.0,
    },
)
# Three steps are an epoch: the checkpoint lies in the second, and its end in the third.
RUN: dict[str, Any] = {"prompts": 6, "max_steps": 8, "save_strategy": "steps", "save_steps": 4}


class Kill(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    slug, options = RECIPE
    with plain_layers():
        trainer(sys.argv[1], slug, options=options, callbacks=[Kill()], **RUN).train()
