"""How many responses each prompt gets and how long they may be, from what earlier visits showed."""

from proxpo.stages.budget.allocation import allocate, knapsack_value
from proxpo.stages.budget.knapsack import knapsack
from proxpo.stages.budget.lengths import length_budget

__all__ = ["allocate", "knapsack", "knapsack_value", "length_budget"]
