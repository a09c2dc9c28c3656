"""Commands that load models and tasks show their own lines alone, and errors of the libraries."""

import logging
import os
import warnings


def silence_libraries() -> None:
    """Hides what libraries print while loading."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", module="torch")
    # Of an installed module that is compiled for the first time: its path stands for its name.
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=".*site-packages")
    for library in ("transformers", "huggingface_hub", "DeepSpeed"):
        logger = logging.getLogger(library)
        logger.setLevel(logging.ERROR)
        logger.addFilter(lambda record: record.levelno >= logging.ERROR)  # DeepSpeed sets its level


__all__ = ["silence_libraries"]
