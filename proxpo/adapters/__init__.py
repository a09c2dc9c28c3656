"""Adapters of proxpo to TRL and verl; each imports its host only when used."""
