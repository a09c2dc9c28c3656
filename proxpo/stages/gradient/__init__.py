"""Gradient transforms as stages, and the objective that any recipe gives to one."""

from proxpo.stages.gradient._objective import Objective, objective, per_response

__all__ = ["Objective", "objective", "per_response"]
