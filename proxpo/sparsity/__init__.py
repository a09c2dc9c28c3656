"""Weights that training changed: sparsity of an update, overlap of two, training of a part.

    d = θ₁ - θ₀,   sparsity = 1 - |{j : |d_j| > tol}| / n

Every figure depends on the dtype it was computed in: bfloat16 has 8 significant bits, so smaller
updates vanish when a checkpoint is cast to it, and a later paper (arXiv:2509.04259) finds no
sparsity in float32. Results therefore carry dtype and tolerance with them.

    before, after = stored_weights("base"), stored_weights("run/checkpoints/step-40")
    compare(before, after, dtype="float32").sparsity

Reference: arXiv:2505.11711; SagnikMukherjee/sparsity_in_rl, whose "layer-wise sparsity" is the
density here: the share changed, without a tolerance.
"""

from proxpo.sparsity._stored import StoredWeights, stored_weights
from proxpo.sparsity._training import train_only
from proxpo.sparsity._update import Dtype, Overlap, TensorUpdate, Update, changed, compare, overlap

__all__ = [
    "Dtype",
    "Overlap",
    "StoredWeights",
    "TensorUpdate",
    "Update",
    "changed",
    "compare",
    "overlap",
    "stored_weights",
    "train_only",
]
