"""Checkpoints of the first form, which held the weights twice."""

import json
from pathlib import Path

from safetensors.torch import save_file

from proxpo.runs import checkpoint
from proxpo.runs.checkpoint import read_checkpoint
from proxpo.runs.trees import flatten


def in_old_form(path: Path) -> None:
    """Rewrites a checkpoint as the form before this one had it: the weights once more, in a file
    of their own."""
    found = read_checkpoint(path)
    for name, tree in found.parts.items():
        for file in path.glob(f"{name}.*"):
            file.unlink()
        tensors, structure = flatten(tree, what=name)
        save_file(tensors, path / f"{name}.safetensors")
        (path / f"{name}.json").write_text(json.dumps(structure))
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"]
    listed = {str(f.relative_to(path)): [f.stat().st_size, checkpoint._hash(f)] for f in files}
    manifest = {"format": 1, "step": found.step, "parts": list(found.parts), "files": listed}
    (path / "manifest.json").write_text(json.dumps(manifest))
