"""A policy's forward and backward pass over sampled sequences, recorded once and replayed.

`graphs` holds the recordings, `passes` what is recorded: prompts once for all their responses
(`prefix`), or whole sequences through the model's own modules (`whole`), from `inputs` in few
shapes.
"""

from proxpo.replay.graphs import CudaRecorder, PolicyGraphs, unsuited
from proxpo.replay.sequences import Sequences

__all__ = ["CudaRecorder", "PolicyGraphs", "Sequences", "unsuited"]
