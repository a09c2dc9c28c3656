"""How many responses each prompt gets and how long they may be, from what earlier visits showed."""

from proxpo.budgets.allocation import allocate, knapsack_value
from proxpo.budgets.knapsack import knapsack
from proxpo.budgets.lengths import length_budget

__all__ = ["allocate", "knapsack", "knapsack_value", "length_budget"]
