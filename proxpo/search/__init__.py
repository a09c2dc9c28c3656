"""Search over compositions of stages: space, proposals, successive halving, confirmation, page."""
