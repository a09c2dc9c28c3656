"""Rules for whole prompts; a trainer samples others for those that a rule refuses."""

from proxpo.stages.prompts.difficulty import within_reach
from proxpo.stages.prompts.informative import informative_prompts

__all__ = [
    "informative_prompts",
    "within_reach",
]
