"""Plugin that verl loads at import in every process: registers losses, estimators and the engine.

verl hides the errors of its plugins, so they are printed here.
"""

import sys

from proxpo.adapters.verl._environment import check_verl, engine_selected


def load_plugin() -> None:
    """Registers with verl; engines only where selected, since importing them fixes the platform."""
    check_verl()
    from proxpo.adapters.verl._config_check import register_config_check
    from proxpo.adapters.verl._estimators import register_estimators
    from proxpo.adapters.verl._losses import register_losses

    register_losses()
    register_estimators()
    register_config_check()
    if engine_selected():
        from proxpo.adapters.verl.engine import register_engine

        register_engine()


try:
    load_plugin()
except Exception as error:
    print(f"proxpo: not loaded into verl: {error}", file=sys.stderr, flush=True)
    raise
