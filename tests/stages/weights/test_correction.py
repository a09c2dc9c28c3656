"""Weights between the sampler's policy and the trainer's."""

import math

import torch
from helpers import close, f64, mismatch

import proxpo
from proxpo.stages.weights import tis as tis_weights

CONTEXT = proxpo.Context()


def weights(batch: object, **options: object) -> torch.Tensor:
    return tis_weights(**options).apply(batch, CONTEXT)[0]


def test_sum_is_clamped_not_the_tokens() -> None:
    batch = mismatch([[15.0, 15.0, -12.0]])
    close(weights(batch, level="sequence", cap=math.inf), math.exp(18.0))
    batch = mismatch([[15.0, 15.0, 15.0]])
    close(weights(batch, level="sequence", cap=math.inf), math.exp(20.0))


def test_missing_sampler_probability_counts_as_agreement() -> None:
    batch = mismatch([[math.nan, 0.4]])
    close(weights(batch), f64([[1.0, math.exp(0.4)]]))
