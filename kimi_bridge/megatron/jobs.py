"""The two command-line jobs: checkpoint -> Megatron checkpoint, and Megatron checkpoint -> checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge

from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.megatron.collective import raise_together, rank
from kimi_bridge.megatron.runtime import Layout, build_model, initialize
from kimi_bridge.megatron.transfer import export_checkpoint


def import_checkpoint(hf_model: str, megatron_path: Path, layout: Layout, overwrite: bool = False) -> None:
    """Loads a checkpoint into a model of `layout` and saves it in Megatron's torch_dist format.

    All ranks call it. The result can be loaded in any layout. Nothing appears at `megatron_path` before it
    is complete.

    Raises:
        KimiBridgeError: the layout does not fit the processes, the checkpoint is damaged, or something is
            already at `megatron_path`.
    """
    initialize(layout)
    with _atomic_folder(megatron_path, overwrite) as folder:
        bridge = _bridge(hf_model)
        model = build_model(bridge.to_megatron_provider(), layout)
        save_megatron(bridge, model, folder)


def export_megatron_checkpoint(
    hf_model: str,
    megatron_path: Path,
    hf_path: Path,
    layout: Layout,
    weight_dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a Megatron checkpoint as a Hugging Face folder, in any layout. All ranks call it.

    `hf_model` is the checkpoint that the training started from: names, files and the codes of untouched
    groups are taken from it.
    """
    initialize(layout)
    bridge = _bridge(hf_model)
    model = build_model(bridge.to_megatron_provider(load_weights=False), layout)
    load_megatron(model, megatron_path)
    export_checkpoint(bridge, model, hf_path, weight_dtype=weight_dtype, overwrite=overwrite)


def save_megatron(bridge: AutoBridge, model: list[torch.nn.Module], path: Path) -> None:
    """Saves the weights, without an optimizer, as a Megatron checkpoint. All ranks call it.

    The tokenizer is not stored (loading it would run the checkpoint's code): trainers read it from
    the Hugging Face folder, whose name the checkpoint keeps.
    """
    bridge.save_megatron_model(model, path)


def load_megatron(model: list[torch.nn.Module], path: Path) -> None:
    """Loads a Megatron checkpoint, saved in whatever layout, into this rank's model chunks.

    Raises:
        KimiBridgeError: no checkpoint there, or one whose parameters are not the model's.
    """
    from megatron.bridge.training.checkpointing import _load_model_weights_from_checkpoint
    from megatron.core.dist_checkpointing.core import CheckpointingException

    folder = latest_iteration(path)
    try:
        # "raise_all": a parameter that the file lacks, or the other way round, is an error.
        _load_model_weights_from_checkpoint(str(folder), model, dist_ckpt_strictness="raise_all")
    except CheckpointingException as error:
        raise KimiBridgeError(f"{folder} does not fit the model of --hf-model: {error}") from error


def latest_iteration(path: Path) -> Path:
    """The folder of the last iteration of a Megatron checkpoint (or `path`, if it is one itself)."""
    if (path / "metadata.json").is_file():
        return path
    iterations = [folder for folder in path.glob("iter_*") if (folder / "metadata.json").is_file()]
    if not iterations:
        raise KimiBridgeError(
            f"{path} holds no Megatron checkpoint (no iter_*/metadata.json): check --megatron-path."
        )
    return max(iterations, key=lambda folder: int(folder.name.removeprefix("iter_")))


def _bridge(hf_model: str) -> AutoBridge:
    with raise_together():
        return AutoBridge.from_hf_pretrained(hf_model)


@contextmanager
def _atomic_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `path` that takes its place when the block succeeds and goes when it does not."""
    staging = path.parent / f".{path.name}.incomplete"
    with raise_together():
        if path.exists() and not overwrite and (not path.is_dir() or any(path.iterdir())):
            raise KimiBridgeError(
                f"{path} already exists: choose another --megatron-path, or pass --overwrite."
            )
        if rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
    try:
        yield staging
        dist.barrier()
        with raise_together():
            if rank() == 0:
                if path.exists():
                    shutil.rmtree(path)
                staging.rename(path)
    finally:
        if rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
