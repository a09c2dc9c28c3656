"""One file per method; compositions only. The listing of this folder is the catalogue."""

from proxpo.recipes._registry import Method, method, methods, register

__all__ = ["Method", "method", "methods", "register"]
