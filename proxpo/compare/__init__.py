"""Plans comparisons of methods and makes their runs."""
