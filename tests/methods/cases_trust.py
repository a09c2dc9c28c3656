"""Cases of the methods that move ratios and trust regions: name -> (slug, settings)."""

from typing import Any

TRUST: dict[str, tuple[str, dict[str, Any]]] = {}
