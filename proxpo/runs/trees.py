"""Nested state as safetensors + JSON: dicts, lists, numbers and tensors, restored to the bit.

State of optimizers, recipes and generators (ints as keys, 0-dim tensors, None, infinities) comes
back with its types; anything else is refused by name rather than pickled.
"""

from collections.abc import Mapping
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Tensor


def flatten(tree: Any, *, what: str = "state") -> tuple[dict[str, Tensor], Any]:
    """The tensors by name, and the rest as JSON with the names in their places."""
    tensors: dict[str, Tensor] = {}
    names: dict[tuple, str] = {}

    def encode(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": _keep(value, path, tensors, names)}
        if isinstance(value, Mapping):
            pairs = ((_key(key, what, path), key, inner) for key, inner in value.items())
            return {"dict": [[shown, encode(inner, f"{path}.{k}")] for shown, k, inner in pairs]}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [encode(inner, f"{path}.{i}") for i, inner in enumerate(value)]}
        return _scalar(value, what, path)

    return tensors, encode(tree, "")


def unflatten(tensors: Mapping[str, Tensor], structure: Any) -> Any:
    """The tree that `flatten` was called with."""
    if not isinstance(structure, dict):
        return structure
    [(kind, value)] = structure.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {unflatten(tensors, key): unflatten(tensors, inner) for key, inner in value}
    if kind == "float":
        return float.fromhex(value)
    made = [unflatten(tensors, inner) for inner in value]
    return made if kind == "list" else tuple(made)


def _keep(value: Tensor, path: str, tensors: dict[str, Tensor], names: dict[tuple, str]) -> str:
    """The tensor's name; tied tensors are kept once, overlapping ones each with its own copy."""
    place = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
    if value.numel() and place in names:
        return names[place]
    name = path.lstrip(".") or "tensor"
    while name in tensors:
        name += "'"
    kept = value.detach().to("cpu").contiguous()
    whole = kept.untyped_storage().nbytes() == kept.nbytes
    tensors[name] = kept if whole else kept.clone()
    names[place] = name
    return name


def _key(key: Any, what: str, path: str) -> Any:
    if isinstance(key, (str, int, float)) or key is None:
        return _scalar(key, what, path)
    raise ProxpoError(f"{what}{path}: a key of type {type(key).__name__} cannot be saved")


def _scalar(value: Any, what: str, path: str) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    raise ProxpoError(
        f"{what}{path}: a value of type {type(value).__name__} cannot be saved; "
        "expected tensors, numbers, text, None, and lists or dicts of them"
    )


__all__ = ["flatten", "unflatten"]
