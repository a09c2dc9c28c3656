"""Tensor functions that stages are made of."""
