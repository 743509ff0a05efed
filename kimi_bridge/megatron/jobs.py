"""The command line's jobs: checkpoint -> Megatron checkpoint, and back; adapters out of a PEFT checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
import torch.distributed as dist
import yaml
from megatron.bridge import AutoBridge
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.lora import LoRA

from kimi_bridge.adapter import AdapterPlan
from kimi_bridge.adapter.peft_format import Target
from kimi_bridge.checkpoint.files import plain_disk_errors
from kimi_bridge.checkpoint.reader import CheckpointReader, resolve_checkpoint
from kimi_bridge.errors import CheckpointError, KimiBridgeError
from kimi_bridge.megatron.collective import raise_together, rank
from kimi_bridge.megatron.compat import require_megatron_checkpoints
from kimi_bridge.megatron.lora import export_adapter
from kimi_bridge.megatron.runtime import Layout, build_model, initialize
from kimi_bridge.megatron.transfer import export_checkpoint, unwrap


def import_checkpoint(hf_model: str, megatron_path: Path, layout: Layout, overwrite: bool = False) -> None:
    """Loads a checkpoint into a model of `layout` and saves it in Megatron's torch_dist format.

    All ranks call it. The result can be loaded in any layout. Nothing appears at `megatron_path` before it
    is complete.

    Raises:
        KimiBridgeError: the layout does not fit the processes, the checkpoint is damaged, or something is
            already at `megatron_path`.
    """
    initialize(layout)
    require_megatron_checkpoints()
    megatron_path = megatron_path.expanduser()
    with raise_together():
        _check_destination(megatron_path, hf_model, overwrite)
    bridge = _bridge(hf_model)
    with _atomic_folder(megatron_path) as folder:
        model = build_model(bridge.to_megatron_provider(), layout)
        try:
            save_megatron(bridge, model, folder)
        except (OSError, RuntimeError) as error:
            # Megatron's writers are processes, whose errors arrive as a RuntimeError with their traceback.
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
            free = shutil.disk_usage(folder).free / 1e9
            raise KimiBridgeError(
                f"{megatron_path} cannot be written ({reason}; {free:.1f} GB are free there): make room, or"
                " check the disk."
            ) from error


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
    require_megatron_checkpoints()
    megatron_path, hf_path = megatron_path.expanduser(), hf_path.expanduser()
    with raise_together():
        latest_iteration(megatron_path)
        if not overwrite and (next(hf_path.glob("*.safetensors"), None) is not None):
            raise KimiBridgeError(
                f"{hf_path} already holds weights: choose another --hf-path, or pass --overwrite."
            )
    bridge = _bridge(hf_model)
    model = build_model(bridge.to_megatron_provider(load_weights=False), layout)
    load_megatron(model, megatron_path)
    export_checkpoint(bridge, model, hf_path, weight_dtype=weight_dtype, overwrite=overwrite)


def export_adapter_checkpoint(
    hf_model: str,
    megatron_path: Path,
    adapter_path: Path,
    layout: Layout,
    target: Target = "vllm",
    expand_shared_experts: bool = False,
    overwrite: bool = False,
) -> AdapterPlan:
    """Writes the adapters of a Megatron-Bridge PEFT checkpoint as a PEFT folder, in any layout.

    All ranks call it. What was trained is read from the checkpoint's `run_config.yaml`; the base weights are
    not needed.

    Raises:
        KimiBridgeError: no such checkpoint, settings that are no LoRA's, adapters that it lacks.
    """
    initialize(layout)
    require_megatron_checkpoints()
    megatron_path, adapter_path = megatron_path.expanduser(), adapter_path.expanduser()
    with raise_together():
        folder = latest_iteration(megatron_path)
        lora = _saved_lora(folder, layout)
        if not overwrite and (next(adapter_path.glob("*.safetensors"), None) is not None):
            raise KimiBridgeError(
                f"{adapter_path} already holds weights: choose another --adapter-path, or pass --overwrite."
            )
    bridge = _bridge(hf_model)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.register_pre_wrap_hook(lambda model: lora(model, training=False))
    model = build_model(provider, layout)
    with raise_together():
        _check_same_model(folder, unwrap(model)[0].config)
    _load_adapters(model, folder, lora)
    return export_adapter(
        bridge,
        model,
        lora,
        adapter_path,
        target=target,
        expand_shared_experts=expand_shared_experts,
        overwrite=overwrite,
    )


def _saved_lora(folder: Path, layout: Layout) -> LoRA | CanonicalLoRA:
    path = folder / "run_config.yaml"
    settings = yaml.safe_load(path.read_text()) if path.is_file() else {}
    saved = settings.get("peft")
    if not isinstance(saved, dict):
        raise KimiBridgeError(
            f"{path} has no section `peft`: export-adapter needs a checkpoint that Megatron-Bridge saved"
            " while it trained a LoRA."
        )
    kinds = {"LoRA": LoRA, "CanonicalLoRA": CanonicalLoRA}
    kind = kinds.get(str(saved.get("_target_")).rpartition(".")[2])
    if kind is None:
        raise KimiBridgeError(
            f"{path} was trained with {saved.get('_target_')}: only LoRA and CanonicalLoRA have an adapter"
            " that PEFT and vLLM can read."
        )
    saved_tp = settings.get("model", {}).get("tensor_model_parallel_size", layout.tp)
    if kind is CanonicalLoRA and saved_tp != layout.tp:
        # Megatron-Bridge (0.6.2) stores the rows of each rank's gate_proj (up_proj) as if they were gate and
        # up, so that another TP size reads them in another order.
        raise KimiBridgeError(
            f"{folder} holds a CanonicalLoRA that was saved at TP {saved_tp}, which Megatron-Bridge cannot"
            f" read back at TP {layout.tp}: pass --tp {saved_tp}."
        )
    # Not what a LoRA keeps for itself, and not the dtype: the model's is taken, the file's is converted.
    names = {field.name for field in fields(kind)} - {"canonical_mapping", "params_to_save", "lora_dtype"}
    return kind(**{key: value for key, value in saved.items() if key in names})


def _load_adapters(model: list[torch.nn.Module], folder: Path, lora: LoRA | CanonicalLoRA) -> None:
    from megatron.bridge.peft.utils import load_peft_adapter_checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    adapters = [
        (name, param)
        for chunk in unwrap(model)
        for name, param in chunk.named_parameters()
        if ".adapter." in name
    ]
    # Loading is not strict about what the file lacks, so that must show.
    for _, param in adapters:
        param.data.fill_(float("nan"))
    try:
        load_peft_adapter_checkpoint(model, folder, lora, fully_parallel_load=False)
    except (Exception, CheckpointException) as error:
        raise _unloadable(folder, error) from error
    with raise_together():
        for name, param in adapters:
            if not param.isfinite().all():
                raise KimiBridgeError(
                    f"{name} is not in {folder}, or holds NaN or Inf there: the checkpoint is incomplete, or"
                    " its training has diverged."
                )


def save_megatron(bridge: AutoBridge, model: list[torch.nn.Module], path: Path) -> None:
    """Saves the weights, without an optimizer, as a Megatron checkpoint. All ranks call it.

    The tokenizer is not stored (loading it would run the checkpoint's code): trainers read it from
    the Hugging Face folder, whose name the checkpoint keeps.
    """
    bridge.save_megatron_model(model, path)


def load_megatron(model: list[torch.nn.Module], path: Path) -> None:
    """Loads a Megatron checkpoint, saved in whatever layout, into this rank's model chunks.

    Raises:
        KimiBridgeError: no checkpoint there, a damaged one, or one of another model.
    """
    from megatron.bridge.training.checkpointing import _load_model_weights_from_checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    with raise_together():
        folder = latest_iteration(path)
        _check_same_model(folder, unwrap(model)[0].config)
    try:
        # "raise_all": a parameter that the file lacks, or the other way round, is an error.
        _load_model_weights_from_checkpoint(str(folder), model, dist_ckpt_strictness="raise_all")
    # CheckpointException is no Exception. Of the others any may come from a damaged file.
    except (Exception, CheckpointException) as error:
        raise _unloadable(folder, error) from error


def _unloadable(folder: Path, error: BaseException) -> KimiBridgeError:
    reason = " ".join((str(error).strip().splitlines() or [type(error).__name__])[-1].split())
    return KimiBridgeError(
        f"{folder} cannot be loaded ({reason[:300]}): it is damaged, or of another model than --hf-model."
    )


def latest_iteration(path: Path) -> Path:
    """The folder of the last iteration of a Megatron checkpoint (or `path`, if it is one itself)."""
    if (path / "metadata.json").is_file():
        return path
    iterations = [
        folder
        for folder in path.glob("iter_*")
        if folder.name.removeprefix("iter_").isdigit() and (folder / "metadata.json").is_file()
    ]
    if not iterations:
        raise KimiBridgeError(
            f"{path} holds no Megatron checkpoint (no iter_*/metadata.json): check --megatron-path."
        )
    return max(iterations, key=lambda folder: int(folder.name.removeprefix("iter_")))


# What makes two models have other tensors. Megatron forgives another vocabulary, and pads with zeros.
_SHAPES = [
    "num_layers",
    "hidden_size",
    "vocab_size",
    "num_moe_experts",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "moe_layer_freq",
]


def _check_same_model(folder: Path, config: Any) -> None:
    settings = folder / "run_config.yaml"
    if not settings.is_file():
        return
    saved = yaml.safe_load(settings.read_text()).get("model", {})
    differences = [
        f"{name} is {saved[name]}, of --hf-model {getattr(config, name)}"
        for name in _SHAPES
        if name in saved and saved[name] != getattr(config, name, None)
    ]
    if differences:
        raise KimiBridgeError(f"{folder} is of another model: {'; '.join(differences)}.")


def _bridge(hf_model: str) -> AutoBridge:
    with raise_together():
        reader = CheckpointReader(resolve_checkpoint(hf_model))
        # Before Megatron-Bridge, which tries a folder that is wrong four times and says why at length.
        reader.check()
        if not reader.config.architectures:
            raise CheckpointError(
                f"{reader.path / 'config.json'} names no architecture: add"
                f' "architectures": ["{reader.family.architecture}"].'
            )
        # A hub id stays one: exports name it as their base.
        return AutoBridge.from_hf_pretrained(str(Path(hf_model).expanduser()))


def _check_destination(path: Path, hf_model: str, overwrite: bool) -> None:
    """Refuses a --megatron-path that `_atomic_folder` could not replace, or should not."""
    target, source = path.resolve(), Path(hf_model).expanduser().resolve()
    for precious in (source, Path.cwd()):
        if precious == target or target in precious.parents:
            raise KimiBridgeError(
                f"--megatron-path {path} holds {precious}: choose a folder of its own for the result."
            )
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise KimiBridgeError(f"{path} is a file or a link: choose another --megatron-path.")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise KimiBridgeError(
                f"{path} already exists: choose another --megatron-path, or pass --overwrite."
            )
        if not (path / "latest_checkpointed_iteration.txt").is_file():
            raise KimiBridgeError(f"{path} is no Megatron checkpoint, so it is not replaced: choose another.")


@contextmanager
def _atomic_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` that takes its place when the block succeeds and goes when it does not."""
    names = [f".{path.name}.{token_hex(4)}"]
    dist.broadcast_object_list(names, src=0)
    staging, old = (path.absolute().parent / f"{names[0]}.{what}" for what in ("incomplete", "old"))
    with raise_together(), plain_disk_errors(staging):
        if rank() == 0:
            staging.mkdir(parents=True)
    try:
        yield staging
        dist.barrier()
        with raise_together(), plain_disk_errors(path):
            if rank() == 0:
                if path.exists():
                    path.rename(old)
                staging.rename(path)
                shutil.rmtree(old, ignore_errors=True)
    finally:
        if rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
