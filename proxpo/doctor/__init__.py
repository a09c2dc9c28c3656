"""Checks of what works on this machine: every host is imported and tried within a time limit.

examine() -> [Finding(name="trl", status="works", version="1.16.0", ...), ...]
"""

from proxpo.doctor._examine import Finding, examine
from proxpo.doctor._hosts import HOSTS, Host

__all__ = ["HOSTS", "Finding", "Host", "examine"]
