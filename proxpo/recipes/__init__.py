"""One file per method; compositions only. The listing of this folder is the catalogue."""

from proxpo.recipes._registry import (
    Method,
    Options,
    Procedure,
    method,
    methods,
    options_of,
    register,
)

__all__ = ["Method", "Options", "Procedure", "method", "methods", "options_of", "register"]
