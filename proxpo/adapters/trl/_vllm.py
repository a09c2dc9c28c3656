"""Mends TRL's weight synchronisation for vLLM's CPU build: weights come through vLLM's own loader.

That build packs the weights of its layers while it loads them and keeps no other copy. TRL writes
new weights to where they were ("'Parameter' object has no attribute 'weight_loader'").
"""

import importlib
from functools import partial
from typing import Any


def mend_sync(generation: Any) -> None:
    """Replaces `sync_weights` of TRL's VLLMGeneration where it does not work."""
    platform = importlib.import_module("vllm.platforms").current_platform
    if generation.mode == "colocate" and platform.is_cpu():
        generation.sync_weights = partial(_reload, generation)


def _reload(generation: Any) -> None:
    """Loads the present weights into vLLM."""
    weights = {"weights_iterator": generation._iter_named_params()}
    generation.llm.collective_rpc("reload_weights", kwargs=weights)
    generation.llm.apply_model(_repack_heads)
    generation.llm.reset_prefix_cache()  # what it holds was computed with the old weights


def _repack_heads(model: Any) -> None:
    """Packs tied heads anew: they have copies of their own, which loading skips."""
    vocabulary = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    for layer in model.modules():
        if isinstance(layer, vocabulary.ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


__all__ = ["mend_sync"]
