"""Five steps of TRL with vLLM in its own process, on a CPU: prints what was found as JSON.

Run by test_trl_vllm.py in vLLM's environment. TRL leaves out two options of vLLM that are set here:
float32, without which log-probabilities cannot agree to 1e-4, and eager mode, without which the run
begins by compiling the model for minutes.
"""

import json
import os
import sys
import tempfile
from functools import partial
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from trl.generation import vllm_generation
from trl_runs import Watched, losses, seen, trainer

from proxpo.adapters.trl._generation_batch import trained_tokens
from proxpo.logp import model_logp
from proxpo.models import load_policy


def saved_model(folder: str) -> Any:
    """A random model whose heads have a size that vLLM's CPU kernels know.

    Its output head is its embedding: of such a head vLLM keeps a packed copy.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    load_policy("tiny").tokenizer.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


class Checked(Watched):
    """Compares each micro-batch's sampler log-probabilities with the weights before the update."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.gaps: list[float] = []
        self.stale: list[float] = []

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        mask, sampled = trained_tokens(inputs), inputs["sampling_per_token_logps"]
        with torch.no_grad():
            for found, weights in ((self.gaps, self.model), (self.stale, self.start)):
                logp = model_logp(weights, ids, mask, attention_mask=attended)
                found.append(float((logp - sampled)[mask].abs().max()))
        return super()._compute_loss(model, inputs)


def main() -> None:
    vllm_generation.LLM = partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(
            f"{folder}/out",
            "grpo",
            options={"weights+": "tis"},
            kind=Checked,
            model=saved_model(f"{folder}/model"),
            **{"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64},
            **{"max_steps": 5, "learning_rate": 1e-2, "vllm_gpu_memory_utilization": 0.1},
        )
        vars(run.start).pop("forward", None)
        run.train()
    found = {"gaps": run.gaps, "stale": run.stale, "losses": losses(run)}
    found["weights"] = seen(run, "proxpo/weights/mean")
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
