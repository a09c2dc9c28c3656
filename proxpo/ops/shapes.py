"""Shapes in signatures: `Float[Tensor, "seq tok"]`, checked in tests and free in training.

Axis legend, used throughout proxpo:
    seq    responses (rows of the batch)
    tok    response tokens (columns)
    group  prompts; every response carries the number of its prompt

The names come from jaxtyping when it has been imported already (the test run does that) and are
plain `Tensor` otherwise, so that `import proxpo` needs nothing but torch.
"""

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:  # a checker sees plain tensors, with or without jaxtyping
    from typing import Annotated as Bool
    from typing import Annotated as Float
    from typing import Annotated as Int
    from typing import Annotated as Num
    from typing import Annotated as Shaped
elif "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Int, Num, Shaped
else:

    class _Plain:
        def __getitem__(self, item: tuple[Any, str]) -> Any:
            return item[0]

    Bool = Float = Int = Num = Shaped = _Plain()

__all__ = ["Bool", "Float", "Int", "Num", "Shaped", "Tensor"]
