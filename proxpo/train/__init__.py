"""The local trainer: loop, rollouts, updates, evaluation, tasks."""
