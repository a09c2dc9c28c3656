"""Its loss without the transform; limits of the transform are in tests/gradients."""

from methods._case import Case
from methods.loops import score, z_scores

CASES = {
    "isopo": Case("isopo", {}, lambda b: sum(score(z_scores(b), b).values())),
}
