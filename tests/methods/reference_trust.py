"""Plain loops for the methods that move ratios and trust regions."""

from methods.reference import Reference

TRUST: dict[str, Reference] = {}
