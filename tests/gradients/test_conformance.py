"""A sample of the run over every causal language model (scripts/model_conformance.py)."""

import conformance
import pytest

# Weights used as `.T`; experts with biases and attention sinks; convolutions and state space
# mixers; heads and positions in one axis; latent attention; positions embedded for all sequences.
SAMPLE = ["bart", "deepseek_v3", "falcon", "gpt2", "gpt_oss", "lfm2", "mamba", "qwen3_next"]


@pytest.mark.parametrize("kind", SAMPLE)
def test_an_architecture_agrees_with_brute_force(kind):
    result = conformance.check(kind)
    assert result.status == "exact", f"{result.detail}"


def test_an_architecture_that_cannot_be_right_is_refused_with_the_reason():
    result = conformance.check("gpt_neox_japanese")
    assert result.status == "refused"
    assert "dense_bias) has no per-sequence form, and the axes of its output" in result.detail
