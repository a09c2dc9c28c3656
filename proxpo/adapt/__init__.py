"""Test-time adaptation: one problem, one answer at a time; whatever is learnt is dropped after it.

    summary = adapt(load_settings("rosa", model="tiny", task="arithmetic", problems=50))

Every problem is answered by the method and, with the same number of tokens through the model, by
plain resampling and by the method's loop with a plain gradient step in place of its update.
"""

from proxpo.adapt.run import adapt
from proxpo.adapt.settings import Settings, load_settings

__all__ = ["Settings", "adapt", "load_settings"]
