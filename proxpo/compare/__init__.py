"""Comparisons of methods: one plan, many runs, one report."""
