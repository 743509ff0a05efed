"""Checkpoints for the check: synthesized with the real widths, and copies with one tensor changed."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch

from kimi_bridge.checkpoint import CheckpointReader, synthesize_checkpoint
from kimi_bridge.errors import CheckpointError

# Kimi K2.5's, beside the number of layers and experts, the vocabulary, and the dense layer's width.
REAL_WIDTHS: dict[str, Any] = {
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def work_folder(keep: Path | None, needed: int = 24 << 30) -> Path:
    """A folder in memory where there is room for everything, else on the disk."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        return keep.resolve()
    shared = Path("/dev/shm")
    in_memory = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > needed
    return Path(tempfile.mkdtemp(prefix="kimi-bridge-check-", dir=shared if in_memory else None))


def source_checkpoint(
    folder: Path, layers: int, experts: int, vocabulary: int, dense: int, small: bool = False
) -> Path:
    """Synthesizes the checkpoint, or takes the one that an earlier run left in the folder.

    `small` has the structure without the widths, for a first try on any machine.
    """
    overrides = {
        "num_hidden_layers": layers,
        "n_routed_experts": experts,
        "vocab_size": vocabulary,
    }
    if small:
        overrides |= {"num_experts_per_tok": min(8, experts)}
    else:
        overrides |= REAL_WIDTHS | {"intermediate_size": dense}
    dst, unfinished = folder / "source", folder / "source-unfinished"
    try:
        text = CheckpointReader(dst).config_dict["text_config"]
        if all(text[key] == value for key, value in overrides.items()):
            return dst
    except CheckpointError:
        pass
    synthesize_checkpoint(unfinished, overrides=overrides, overwrite=True)
    scale_embeddings(unfinished)
    shutil.rmtree(dst, ignore_errors=True)
    return unfinished.rename(dst)


def scale_embeddings(checkpoint: Path, factor: float = 4.0) -> None:
    """Makes the embeddings larger, so that a layer adds less to the stream, as in a deep model.

    In three layers of random weights each is as loud as the embeddings. Routers of random weights nearly tie
    for a tenth of all tokens, and which expert wins is then decided by the rounding of trainer and engine.
    """
    reader = CheckpointReader(checkpoint)
    info = reader.info("language_model.model.embed_tokens.weight")
    values = (reader.tensor(info.name) * factor).reshape(-1).view(torch.uint8).numpy()
    reader.close()
    with (checkpoint / info.filename).open("r+b") as file:
        file.seek(info.offset)
        file.write(values)


def copy_with_change(src: Path, dst: Path, tensor: str, byte: int = 0) -> Path:
    """A copy of a checkpoint with one bit of one tensor flipped; shards without it are links.

    The bit is the lowest of the byte at `byte` of the tensor: bfloat16's last bit of the mantissa.
    """
    reader = CheckpointReader(src)
    filename = reader.weight_map[tensor]
    shutil.rmtree(dst, ignore_errors=True)
    dst.mkdir(parents=True)
    for path in src.iterdir():
        if path.is_file() and path.name != filename:
            (dst / path.name).symlink_to(path.resolve())
    shutil.copyfile(src / filename, dst / filename)
    with (dst / filename).open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        begin, _ = json.loads(file.read(length))[tensor]["data_offsets"]
        file.seek(8 + length + begin + byte)
        (value,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([value ^ 1]))
    return dst


def text_bytes(src: Path) -> int:
    """What a load of the text model reads."""
    reader = CheckpointReader(src)
    return sum(reader.info(name).nbytes for name in reader.names() if name.startswith("language_model."))
