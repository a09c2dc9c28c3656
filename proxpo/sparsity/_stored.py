"""Weights in safetensors files, read one tensor at a time."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Tensor


class StoredWeights(Mapping[str, Tensor]):
    """Mapping of names to tensors, each read on access."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def stored_weights(path: str | Path) -> StoredWeights:
    """The weights in a .safetensors file or in a folder of them: a model's, shards included.

    A checkpoint of `proxpo train` has them in its subfolder `model`, or in weights.safetensors.
    """
    from safetensors import SafetensorError, safe_open

    files: dict[str, Any] = {}
    for file in _files(Path(path)):
        try:
            opened = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ProxpoError(f"{file}: not a safetensors file: {error}") from None
        files |= dict.fromkeys(opened.keys(), opened)
    return StoredWeights(files)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ProxpoError(f"{path}: no such file or folder")
    if path.is_file():
        return [path]
    if (path / "model").is_dir():
        path = path / "model"
    if (path / "weights.safetensors").is_file():
        return [path / "weights.safetensors"]
    files = sorted(path.glob("*.safetensors"))
    files = [file for file in files if "model" in file.stem] or files
    if not files:
        raise ProxpoError(
            f"{path}: holds no .safetensors file; save the weights of a model there "
            "(model.save_pretrained does)"
        )
    return files
