"""Numbers and lengths of the responses to each prompt, from the outcomes of earlier visits."""

from proxpo.stages.budget.allocation import allocate, knapsack_value
from proxpo.stages.budget.knapsack import knapsack
from proxpo.stages.budget.lengths import length_budget

__all__ = ["allocate", "knapsack", "knapsack_value", "length_budget"]
