"""Ways to spoil a checkpoint folder, and the real inventory of tensors."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

DATA = Path(__file__).parent.parent / "data"
INDEX = "model.safetensors.index.json"
PREFIX = "language_model.model.layers."

# An INT4 weight of the tiny checkpoint, and a plain one.
EXPERT = PREFIX + "1.mlp.experts.3.down_proj.weight"
PLAIN = PREFIX + "1.self_attn.o_proj.weight"


def real_inventory() -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of each of the 208,550 published tensors."""
    inventory = {}
    for entry in json.loads((DATA / "tensors.json").read_text())["tensors"]:
        ranges = {
            key: range(entry[key + "s"][0], entry[key + "s"][1] + 1)
            for key in ("layer", "expert", "block")
            if key + "s" in entry
        }
        for numbers in itertools.product(*ranges.values()):
            name = entry["name"].format(**dict(zip(ranges, numbers, strict=True)))
            inventory[name] = (entry["dtype"], tuple(entry["shape"]))
    return inventory


def edit_json(path: Path, edit: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def edit_shard(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrites a shard with other tensors; the index stays as it is."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def replace_tensor(folder: Path, name: str, tensor: torch.Tensor) -> None:
    edit_shard(shard_of(folder, name), lambda tensors: tensors.__setitem__(name, tensor))


def remove_tensor(folder: Path, name: str) -> None:
    """From its shard and from the index."""
    edit_shard(shard_of(folder, name), lambda tensors: tensors.__delitem__(name))
    edit_json(folder / INDEX, lambda index: index["weight_map"].__delitem__(name))


def add_tensor(folder: Path, name: str, tensor: torch.Tensor, beside: str) -> None:
    """Into the shard that holds `beside`, and into the index."""
    shard = shard_of(folder, beside)
    edit_shard(shard, lambda tensors: tensors.__setitem__(name, tensor))
    edit_json(folder / INDEX, lambda index: index["weight_map"].__setitem__(name, shard.name))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
