"""Pictures of methods, drawn from the code: the weight a token's gradient gets, as a small SVG.

    from proxpo.pictures import picture

    svg = picture("grpo")
    svg = picture(recipe, batch)

docs/gallery.md shows those of all methods.
"""

from proxpo.errors import ProxpoError
from proxpo.pictures._own import own_panel
from proxpo.pictures._procedures import procedure_panel
from proxpo.pictures._svg import Panel, draw_svg, same_picture
from proxpo.pictures._weights import ratio_panel, strip_panel
from proxpo.recipes import Procedure
from proxpo.settings import make_method
from proxpo.types import Batch, Recipe


def picture(method: Recipe | Procedure | str, batch: Batch | None = None) -> str:
    """The picture of a method as SVG; a name stands for the method with its defaults.

    A recipe has two panels: the weight of a token over its ratio, and the weight of every token of
    the batch, by default the one that proxpo ships. What acts around the loss (a gradient
    transform, a schedule, a budget) takes the place of one of them.
    """
    return draw_svg(*panels(method, batch))


def panels(method: Recipe | Procedure | str, batch: Batch | None = None) -> tuple[list[Panel], str]:
    """Panels of a method's picture, and its name."""
    made = make_method(method) if isinstance(method, str) else method
    if isinstance(made, Procedure):
        own = procedure_panel(made.name, made.options)
        if own is None:
            raise ProxpoError(f"{made.name}: no picture is known for it")
        return [own], made.name
    own = own_panel(made)
    if made.ratio.gives == "no ratio":
        first: Panel = ratio_panel(made) if own is None else own
        return [first, strip_panel(made, batch)], made.name
    return [ratio_panel(made), strip_panel(made, batch) if own is None else own], made.name


__all__ = ["panels", "picture", "same_picture"]
