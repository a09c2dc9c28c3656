"""A recipe's memory, the reference model and the paper beside TRL's own files in a checkpoint."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load, load_model, save, save_model
from torch import nn

from proxpo.errors import ProxpoError
from proxpo.gradients import Transform
from proxpo.recipes import methods
from proxpo.recipes._papers import bibtex, find_paper
from proxpo.runs.files import write_whole
from proxpo.runs.trees import flatten, unflatten
from proxpo.types import Recipe, States

MEMORY = "proxpo_recipe"
REFERENCE = "proxpo_reference.safetensors"


def write_memory(folder: Path, recipe: Recipe, states: States, transform: Transform | None) -> None:
    """Writes the states of the stages and the transform's trailing averages."""
    memory: dict[str, Any] = {"recipe": recipe.name, "state": states}
    if transform is not None:
        memory["transform"] = transform.state_dict()
    tensors, structure = flatten(memory, what="recipe")
    write_whole(folder / f"{MEMORY}.safetensors", save(tensors))
    write_whole(folder / f"{MEMORY}.json", json.dumps(structure, allow_nan=False).encode())


def read_memory(folder: Path, recipe: Recipe, transform: Transform | None) -> States:
    """Reads the states to go on from, and loads the transform's averages into it."""
    fresh = recipe.init_state()
    if not fresh and transform is None and not (folder / f"{MEMORY}.json").exists():
        return fresh  # the recipe has no memory: any checkpoint of TRL will do
    try:
        structure = json.loads((folder / f"{MEMORY}.json").read_text())
        memory = unflatten(load((folder / f"{MEMORY}.safetensors").read_bytes()), structure)
    except OSError as error:
        raise ProxpoError(
            f"{folder} cannot be resumed from: the recipe's state is missing ({MEMORY}.*); it was "
            "not saved by ProxpoTrainer"
        ) from error
    if memory["recipe"] != recipe.name:
        raise ProxpoError(
            f"{folder} was saved by recipe {memory['recipe']}, this is {recipe.name}; to change "
            "the method, start a new run from the saved model"
        )
    if transform is not None:
        transform.load_state_dict(memory["transform"])
    return memory["state"]


def write_reference(folder: Path, model: nn.Module) -> None:
    """Writes the reference model that `sync_ref_model` has moved; TRL saves none."""
    save_model(model, str(folder / REFERENCE))


def read_reference(folder: Path, model: nn.Module) -> None:
    """Loads the saved weights into the reference model."""
    if not (folder / REFERENCE).exists():
        raise ProxpoError(
            f"{folder} cannot be resumed from with sync_ref_model=True: the reference model is "
            f"missing ({REFERENCE}); ProxpoTrainer saves it where it is not sharded"
        )
    load_model(model, str(folder / REFERENCE))


def paper_of(recipe: Recipe) -> dict[str, str]:
    """The recipe's paper for TRL's model card; empty for a recipe outside the catalogue."""
    entry = methods().get(recipe.name)
    if entry is None:
        return {}
    number, paper = find_paper(entry)
    title = paper.title if paper else ""
    return {"title": title or f"arXiv:{number}", "id": number, "citation": bibtex(entry)}


__all__ = [
    "MEMORY",
    "paper_of",
    "read_memory",
    "read_reference",
    "write_memory",
    "write_reference",
]
