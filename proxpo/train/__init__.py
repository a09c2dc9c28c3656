"""The local trainer: a model in the box, small tasks, a sampler, and one page of loop."""
