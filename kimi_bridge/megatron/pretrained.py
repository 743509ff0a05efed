"""Megatron-Bridge's view of a checkpoint folder: its weights as plain tensors, its files as they are.

Upstream opens a shard and lists its keys for every single tensor, sees no `.weight` where a triplet
stands, and saves a folder through a tokenizer class that needs remote code. The classes here replace
those three steps and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource, StateDict

from kimi_bridge.checkpoint.config import KimiConfig
from kimi_bridge.checkpoint.files import copy_artifacts
from kimi_bridge.checkpoint.reader import CheckpointReader, resolve_checkpoint
from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.megatron import transfer


class _Names(list):
    """A list of names that knows its members at once: upstream asks `in` for each of 140,000."""

    def __init__(self, names: Iterable[str]):
        super().__init__(names)
        self._members = frozenset(self)

    def __contains__(self, name: object) -> bool:
        return name in self._members


class KimiStateSource(SafeTensorsStateSource):
    """A checkpoint's weights by their plain names: an INT4 triplet reads as its dequantized `.weight`.

    Args:
        path: a local folder or a hub id.

    Raises:
        CheckpointError: the folder is damaged (see `CheckpointReader`).
    """

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.reader = CheckpointReader(resolve_checkpoint(path))
        self.reader.check()
        self._names = _Names(self.reader.weight_names())

    @property
    def path(self) -> Path:
        return self.reader.path

    @property
    def key_to_filename_map(self) -> dict[str, str]:
        return {name: self._filename(name) for name in self._names}

    def get_all_keys(self) -> list[str]:
        return self._names

    def load_tensors(self, keys_to_load: list[str]) -> dict[str, torch.Tensor]:
        return {name: self.reader.weight(name) for name in keys_to_load}

    def save_generator(
        self,
        generator: Any,
        output_path: str | Path,
        *_args: Any,
        distributed_save: bool = False,
        **_kwargs: Any,
    ) -> None:
        """Writes a `WeightStream` as a folder that serves. All ranks call it; rank 0 writes."""
        if distributed_save:
            raise KimiBridgeError(
                "distributed_save is not supported: leave it False, rank 0 streams the shards."
            )
        if not isinstance(generator, transfer.WeightStream):
            raise KimiBridgeError(
                "this model's weights were filtered or quantized by another tool before saving:"
                " save it with kimi_bridge.megatron.export_checkpoint."
            )
        transfer.save(generator, self.reader, Path(output_path))

    def _filename(self, name: str) -> str:
        stored = f"{name}_packed" if self.reader.is_triplet(name) else name
        return self.reader.weight_map[stored]


class KimiPretrained(PreTrainedCausalLM):
    """`PreTrainedCausalLM` for a Kimi folder: reads through `KimiStateSource`, copies files verbatim."""

    @property
    def state(self) -> StateDict:
        install_source(self)
        return self._state_dict_accessor

    def save_artifacts(self, save_directory: str | Path, *_args: Any, **_kwargs: Any) -> None:
        """Copies config, tokenizer, chat template and modeling files unchanged; runs none of them."""
        copy_artifacts(install_source(self).path, Path(save_directory))


def install_source(hf_pretrained: Any) -> KimiStateSource:
    """The wrapper's `KimiStateSource`, put in place of its default source the first time.

    Raises:
        KimiBridgeError: the wrapper holds a model in memory, or names no checkpoint.
    """
    accessor = getattr(hf_pretrained, "_state_dict_accessor", None)
    source = getattr(accessor, "source", None)
    if isinstance(source, KimiStateSource):
        return source
    path = getattr(hf_pretrained, "model_name_or_path", None)
    if not path:
        raise KimiBridgeError(
            "this bridge reads its weights from a checkpoint folder, and this object names none:"
            " use AutoBridge.from_hf_pretrained(PATH)."
        )
    source = KimiStateSource(path)
    hf_pretrained._state_dict_accessor = StateDict(source)
    return source


def use_pretrained_class() -> None:
    """Makes `AutoBridge.from_hf_pretrained` wrap Kimi folders in `KimiPretrained`. Idempotent."""
    original = AutoBridge.__dict__["from_hf_pretrained"].__func__
    if getattr(original, "_kimi_bridge", False):
        return

    def from_hf_pretrained(cls: type, path: str | Path, **kwargs: Any) -> Any:
        bridge = original(cls, path, **kwargs)
        if isinstance(bridge.hf_pretrained.config, KimiConfig):
            bridge.hf_pretrained.__class__ = KimiPretrained
        return bridge

    from_hf_pretrained.__doc__ = original.__doc__
    from_hf_pretrained._kimi_bridge = original  # type: ignore[attr-defined]
    AutoBridge.from_hf_pretrained = classmethod(from_hf_pretrained)  # type: ignore[method-assign]


def use_upstreams_class() -> None:
    """Undoes `use_pretrained_class`."""
    current = AutoBridge.__dict__["from_hf_pretrained"].__func__
    if original := getattr(current, "_kimi_bridge", None):
        AutoBridge.from_hf_pretrained = classmethod(original)  # type: ignore[method-assign]
