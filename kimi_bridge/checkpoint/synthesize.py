"""Small checkpoints with the real structure: every kind of tensor, several shards, INT4 triplets."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_bridge.checkpoint.cores import usable_cores
from kimi_bridge.checkpoint.families import FAMILIES
from kimi_bridge.checkpoint.files import destination, write_json
from kimi_bridge.checkpoint.quantization import Int4Quantization, read_quantization, without_quantization
from kimi_bridge.checkpoint.synthetic_config import checkpoint_specs, synthetic_config, weight_specs
from kimi_bridge.checkpoint.synthetic_tokenizer import save_tokenizer
from kimi_bridge.checkpoint.triplets import part_names
from kimi_bridge.checkpoint.writer import CheckpointWriter, TensorSpec
from kimi_bridge.errors import CheckpointError
from kimi_bridge.int4 import KIMI_QAT, RTN, Int4Scheme, Int4Weight, dequantize, pack, quantize

CONVENTIONS = ("kimi", "rtn", "mixed")

_SHARDS = 4


def synthesize_checkpoint(
    dst: str | Path,
    size: str = "tiny",
    seed: int = 0,
    convention: str = "kimi",
    int4: bool | None = None,
    overrides: dict[str, Any] | None = None,
    overwrite: bool = False,
    family: str = "kimi_k25",
) -> Path:
    """Writes a checkpoint that loads, trains and serves: weights, config, tokenizer. Returns `dst`.

    The same arguments give the same bytes. `family` is "kimi_k25" or "kimi_vl", a model_type. Of Kimi K2.5,
    whose experts are INT4, `convention` is how they were quantized: "kimi" (amax/7), "rtn" (amax/7.5, codes
    of -8), or "mixed" (groups that no convention would produce), and `int4=False` writes what the same INT4
    checkpoint dequantizes to, without a quantization_config. Kimi-VL is bfloat16 throughout.
    `overrides` replace values of text_config. At least one triplet lies in two shards.
    Raises CheckpointError for unknown names, a config that does not work out, and an unusable `dst`.
    """
    if convention not in CONVENTIONS:
        raise CheckpointError(f"Unknown convention {convention!r}: choose from {', '.join(CONVENTIONS)}.")
    config = synthetic_config(size, overrides, family)
    quantization = read_quantization(config)
    if quantization is None and (int4 or convention != CONVENTIONS[0]):
        raise CheckpointError(
            f"{FAMILIES[family].title} is published in bfloat16: leave int4 and convention out, and quantize"
            " the result where you want INT4."
        )
    int4 = quantization is not None if int4 is None else int4
    weights = list(weight_specs(config))
    if not int4:
        config = without_quantization(config)
    specs = checkpoint_specs(config)
    dst = destination(dst)

    def tensors_of(spec: TensorSpec) -> list[tuple[str, Tensor]]:
        generator = _generator(seed, spec.name)
        if quantization is None or not quantization.is_int4(spec.name):
            return [(spec.name, _plain_values(spec, generator))]
        codes = _int4_values(spec, generator, convention, quantization)
        if not int4:
            return [(spec.name, dequantize(codes, spec.dtype))]
        parts = (codes.packed, codes.scale, torch.tensor(spec.shape, dtype=torch.int32))
        return list(zip(part_names(spec.name), parts, strict=True))

    with CheckpointWriter(dst, specs, _shard_size(specs), overwrite) as writer:
        for tensors in _ahead(tensors_of, weights):
            for name, tensor in tensors:
                writer.write(name, tensor)
        _write_other_files(dst, config)
    return dst


def _ahead(
    tensors_of: Callable[[TensorSpec], list[tuple[str, Tensor]]], weights: list[TensorSpec]
) -> Iterator[list[tuple[str, Tensor]]]:
    """In order, computed by threads a little ahead: a generator of random numbers uses one core."""
    threads = min(usable_cores(), 16)
    waiting: deque[Future[list[tuple[str, Tensor]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for spec in weights:
            waiting.append(pool.submit(tensors_of, spec))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _shard_size(specs: list[TensorSpec]) -> int:
    """About a quarter of the total, such that the first shard ends between two tensors of a triplet."""
    ends = list(accumulate(spec.nbytes for spec in specs))
    inside = [
        end for end, spec in zip(ends, specs, strict=True) if spec.name.endswith(".weight_packed")
    ] or ends
    return min(inside, key=lambda end: abs(end - ends[-1] / _SHARDS))


def _generator(seed: int, name: str) -> torch.Generator:
    """Values depend on seed and name alone, not on the order of writing."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _plain_values(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    values = torch.randn(spec.shape, generator=generator)
    if spec.name.endswith("bias"):
        values *= 0.02
    elif len(spec.shape) == 1:
        values = 1 + 0.1 * values
    else:
        values *= _std(spec)
    return values.to(spec.dtype)


def _std(spec: TensorSpec) -> float:
    """1/sqrt(fan-in) keeps activations near 1 in any width; 0.02 at 2,500, as published models have."""
    if spec.name.endswith("embed_tokens.weight"):
        return 0.5
    # Logits of standard deviation 2: neither uniform nor one-hot.
    gain = 2.0 if spec.name.endswith("lm_head.weight") else 1.0
    return gain * prod(spec.shape[1:]) ** -0.5


def _int4_values(
    spec: TensorSpec, generator: torch.Generator, convention: str, quantization: Int4Quantization
) -> Int4Weight:
    if convention == "mixed":
        return _mixed_groups(spec, generator, quantization.group_size)
    base = KIMI_QAT if convention == "kimi" else RTN
    scheme = Int4Scheme(quantization.group_size, base.scale_divisor, base.q_min)
    return quantize(_plain_values(spec, generator), scheme)


def _mixed_groups(spec: TensorSpec, generator: torch.Generator, group_size: int) -> Int4Weight:
    """Groups of eight kinds, which a lossless export must all give back bit for bit."""
    rows, columns = spec.shape
    groups = (rows, columns // group_size)
    kind = torch.randint(0, 8, groups, generator=generator)
    codes = torch.randint(-7, 8, (*groups, group_size), generator=generator)
    # Arbitrary mantissas: a tenth of them are no fixed point of amax/7.
    scale = (torch.rand(groups, generator=generator) + 0.5) * _std(spec) / 2.5
    scale = scale.to(spec.dtype)

    codes[kind == 0, 0] = 7
    codes[kind == 1, 0] = -8
    codes[(kind == 2) | (kind == 3)] = 0
    scale[kind == 2] = 0
    codes[kind == 4] %= 4
    codes[kind == 5] = -codes[kind == 5].abs().clamp(max=5)
    codes[kind == 6] = torch.arange(group_size) % 2
    # The smallest numbers of bfloat16, down to the denormal 2**-133.
    tiny = torch.randint(1, 256, groups, generator=generator, dtype=torch.int16).view(torch.bfloat16)
    scale[kind == 7] = tiny[kind == 7].to(spec.dtype)
    return Int4Weight(pack(codes.to(torch.int8).flatten(1)), scale, (rows, columns))


def _write_other_files(dst: Path, config: dict[str, Any]) -> None:
    text = config["text_config"]
    save_tokenizer(dst, text["vocab_size"])
    ids = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(dst / "generation_config.json", ids | {"max_length": 4096})
    write_json(dst / "config.json", config)
