"""Every method once more as plain loops over rows and tokens: obviously right, but slow."""

from methods.loops import Reference
from methods.reference_fields import FIELDS
from methods.reference_groups import GROUPS
from methods.reference_returns import RETURNS
from methods.reference_schedules import SCHEDULES
from methods.reference_stale import STALE
from methods.reference_tokens import TOKENS
from methods.reference_trust import TRUST

REFERENCES: dict[str, Reference] = RETURNS | GROUPS | STALE | FIELDS | TOKENS | TRUST | SCHEDULES
