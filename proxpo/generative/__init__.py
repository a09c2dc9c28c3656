"""Generative models: denoisers, flows and samplers of energies, trained by reward or by energy."""
