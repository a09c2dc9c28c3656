"""What verl loads at import, in every process: register losses, estimators and the engine.

verl keeps the errors of its plugins to itself, so ours are printed here.
"""

import sys

from proxpo.adapters.verl._host import check_host, our_engine


def load() -> None:
    """Register with verl; engines only where asked for, since importing them fixes the platform."""
    check_host()
    from proxpo.adapters.verl import _estimators, _losses, _run

    _losses.register()
    _estimators.register()
    _run.register()
    if our_engine():
        from proxpo.adapters.verl import engine

        engine.register()


try:
    load()
except Exception as error:
    print(f"proxpo: not loaded into verl: {error}", file=sys.stderr, flush=True)
    raise
