"""The weight index of a saved pair: it maps each weight of the target to a file in the target's subfolder. A Trainer that
resumes from a checkpoint loads its model's weights through this index."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .files import fields_of, write_json


def write_index(folder: Path, target: str) -> None:
    """Write the index of the weights in the subfolder `target`. If only an adapter is there, remove the index instead."""
    own = folder / SAFE_WEIGHTS_INDEX_NAME
    sharded, single = folder / target / SAFE_WEIGHTS_INDEX_NAME, folder / target / SAFE_WEIGHTS_NAME
    if sharded.is_file():
        files = fields_of(sharded)["weight_map"]
    elif single.is_file():
        with safe_open(single, framework="pt") as weights:
            files = dict.fromkeys(weights.keys(), SAFE_WEIGHTS_NAME)
    else:
        own.unlink(missing_ok=True)
        return
    size = sum((folder / target / name).stat().st_size for name in set(files.values()))
    places = {name: f"{target}/{file}" for name, file in files.items()}
    write_json(own, {"metadata": {"total_size": size}, "weight_map": places})
