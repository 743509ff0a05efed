"""What a checkpoint folder holds, from its config, its headers, and a sample of its codes."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_bridge.checkpoint.families import FAMILIES, TEXT_PREFIX
from kimi_bridge.checkpoint.kinds import KINDS, tensor_kind
from kimi_bridge.checkpoint.reader import CheckpointReader
from kimi_bridge.checkpoint.synthetic_config import checkpoint_specs
from kimi_bridge.checkpoint.triplets import part_names
from kimi_bridge.errors import CheckpointError, Int4Error
from kimi_bridge.int4 import KIMI_QAT, RTN, Int4Scheme, Int4Weight, dequantize, quantize, unpack

# A sample of 64 rows of the real experts is 230 KB of codes.
_SAMPLE_ROWS = 64
_PROBLEMS_SHOWN = 20

NO_DATA = "no data: the sampled shards hold only zeros or holes"
NO_INT4 = "not quantized: no INT4 weights"


@dataclass
class KindCount:
    """Tensors and bytes of one kind."""

    kind: str
    tensors: int = 0
    bytes: int = 0


@dataclass
class Convention:
    """Which INT4 convention the sampled codes fit; shares are of the groups that are not all zero.

    A group made by /7 comes back from /7 with its codes and scale. A group made by /7.5 does not come back
    from /7.5, because its extreme was 7.5 times the scale and has become 7 or -8 times: codes of -8 give
    that convention away.
    """

    weights: int = 0
    groups: int = 0
    zero_groups: int = 0
    kimi_share: float = 0.0
    rtn_share: float = 0.0
    minus_8_share: float = 0.0
    below_7_share: float = 0.0
    verdict: str = NO_DATA


@dataclass
class Inspection:
    """What inspect_checkpoint found. `model` and `quantization` are empty where config.json has none."""

    path: str
    model: dict[str, Any] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)
    shards: int = 0
    tensors: int = 0
    bytes: int = 0
    kinds: list[KindCount] = field(default_factory=list)
    convention: Convention = field(default_factory=Convention)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self)

    def to_json(self) -> str:
        """A JSON text."""
        return json.dumps(self.to_dict(), indent=2)


def inspect_checkpoint(path: str | Path, sample: int = 16) -> Inspection:
    """Looks at a folder without loading it: headers of all shards, and codes of `sample` INT4 weights.

    Damaged or missing shards and tensors that do not fit the config are listed in `problems`.
    Raises CheckpointError only where there is nothing to look at: no folder, no weights, a broken index.
    """
    begin = time.perf_counter()
    reader = CheckpointReader(path, tolerate=True)
    reader.check()
    result = Inspection(str(path))
    result.model = _model(reader)
    result.quantization = _quantization(reader)
    infos = [reader.info(name) for name in reader.names()]
    result.shards = len({info.filename for info in infos})
    result.tensors, result.bytes = len(infos), sum(info.nbytes for info in infos)
    kinds = {kind: KindCount(kind) for kind in KINDS}
    for info in infos:
        count = kinds[tensor_kind(info.name)]
        count.tensors += 1
        count.bytes += info.nbytes
    result.kinds = [count for count in kinds.values() if count.tensors]
    result.convention = _sample_codes(reader, sample)
    problems = reader.problems + (_against_config(reader) if result.model.get("layers") is not None else [])
    result.problems = problems[:_PROBLEMS_SHOWN]
    if len(problems) > _PROBLEMS_SHOWN:
        result.problems.append(f"... and {len(problems) - _PROBLEMS_SHOWN} more problems.")
    result.seconds = time.perf_counter() - begin
    return result


def _against_config(reader: CheckpointReader) -> list[str]:
    """Where the tensors are not those that config.json implies."""
    text = reader.config.text_config
    if not (0 < text.num_hidden_layers < 1000 and 0 < (text.n_routed_experts or 0) < 10_000):
        return [f"config.json states {text.num_hidden_layers} layers of {text.n_routed_experts} experts."]
    try:
        specs = checkpoint_specs(reader.config_dict)
    except (CheckpointError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        return [f"config.json does not describe a model ({type(error).__name__}: {error})."]
    expected = {spec.name: tuple(spec.shape) for spec in specs}
    if reader.config.tie_word_embeddings:
        expected.pop(f"{TEXT_PREFIX}lm_head.weight", None)
    found = {name for name in reader.names() if not name.endswith(".rotary_emb.inv_freq")}
    if reader.config_dict.get("vision_config") is None:
        found = {name for name in found if name.startswith(TEXT_PREFIX)}
    shapes = [name for name in expected if name in found and reader.info(name).shape != expected[name]]
    faults = (
        ("missing, by config.json", [name for name in expected if name not in found]),
        ("not in the model that config.json describes", sorted(found - expected.keys())),
        ("of another shape than config.json says", shapes),
    )
    return [f"{len(names)} tensors are {what}, first {names[0]}." for what, names in faults if names]


def _model(reader: CheckpointReader) -> dict[str, Any]:
    try:
        config = reader.config
    except CheckpointError:
        # Already among the problems; say at least what the file claims to be.
        raw = reader.__dict__.get("config_dict", {})
        return {key: raw[key] for key in ("architectures", "model_type") if key in raw}
    text = config.text_config
    stated = config.to_dict()["text_config"].get("model_type")
    vision_layers = f"{FAMILIES[config.model_type].vision_key}num_hidden_layers"
    dense = min(text.first_k_dense_replace or 0, text.num_hidden_layers)
    return {
        "architecture": (config.architectures or [None])[0],
        "model_type": f"{config.model_type} ({stated})",
        "layers": text.num_hidden_layers,
        "dense_layers": dense,
        "moe_layers": text.num_hidden_layers - dense,
        "experts": text.n_routed_experts,
        "experts_per_token": text.num_experts_per_tok,
        "shared_experts": text.n_shared_experts,
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "moe_intermediate_size": text.moe_intermediate_size,
        "attention_heads": text.num_attention_heads,
        "q_lora_rank": text.q_lora_rank,
        "kv_lora_rank": text.kv_lora_rank,
        "vocab_size": text.vocab_size,
        "vision_layers": (config.vision_config or {}).get(vision_layers),
    }


def _quantization(reader: CheckpointReader) -> dict[str, Any]:
    try:
        found = reader.quantization
    except CheckpointError:
        return {}
    if found is None:
        return {}
    return {
        "group_size": found.group_size,
        "targets": list(found.targets),
        "ignore": list(found.ignore),
        "weights": sum(reader.weights().values()),
    }


def _sample_codes(reader: CheckpointReader, sample: int) -> Convention:
    convention = Convention(verdict=NO_DATA if any(reader.weights().values()) else NO_INT4)
    sums = torch.zeros(4, dtype=torch.int64)
    for name in _spread(_readable_triplets(reader), sample):
        try:
            weight = _read_sample(reader, name)
            if weight is None:
                continue
            nonzero = unpack(weight.packed, weight.shape).unflatten(1, (-1, weight.group_size)).ne(0).any(-1)
            sums += torch.stack([facts[nonzero].sum() for facts in _group_facts(weight)])
        except (CheckpointError, Int4Error) as error:
            reader.problems.append(f"{name}: {error}")
            continue
        convention.weights += 1
        convention.groups += nonzero.numel()
        convention.zero_groups += int((~nonzero).sum())
    data = convention.groups - convention.zero_groups
    if data:
        shares = [int(n) / data for n in sums]
        convention.kimi_share, convention.rtn_share = shares[:2]
        convention.minus_8_share, convention.below_7_share = shares[2:]
        convention.verdict = _verdict(convention)
    return convention


def _readable_triplets(reader: CheckpointReader) -> list[str]:
    """INT4 weights all of whose parts lie in shards of the size they should have: others cannot be opened."""
    ends: dict[str, int] = {}
    for info in map(reader.info, reader.names()):
        ends[info.filename] = max(ends.get(info.filename, 0), info.offset + info.nbytes)
    sound = {name for name, end in ends.items() if (reader.path / name).stat().st_size == end}
    return [
        name
        for name, is_triplet in reader.weights().items()
        if is_triplet
        and all(part in reader and reader.info(part).filename in sound for part in part_names(name))
    ]


def _spread(names: list[str], count: int) -> list[str]:
    """`count` names at even distances."""
    count = min(count, len(names))
    return [names[i * len(names) // count] for i in range(count)]


def _read_sample(reader: CheckpointReader, name: str) -> Int4Weight | None:
    """The first rows of an INT4 weight; None where the file holds only zeros."""
    packed_name, scale_name, _ = part_names(name)
    rows = slice(0, min(_SAMPLE_ROWS, reader.info(packed_name).shape[0]))
    # Words of zero are codes of -8: a hole is known by its scales, and by its weight_shape of zeros.
    if not reader.slice(packed_name, rows).any() and not reader.slice(scale_name, rows).any():
        return None
    return reader.int4(name, rows)


def _group_facts(weight: Int4Weight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per group: fixed point of /7, fixed point of /7.5, a code of -8, and largest code below 7."""
    codes = unpack(weight.packed, weight.shape).unflatten(1, (-1, weight.group_size))
    return (
        _is_fixed_point(weight, KIMI_QAT),
        _is_fixed_point(weight, RTN),
        codes.eq(-8).any(-1),
        codes.to(torch.int16).abs().amax(-1).lt(7),
    )


def _is_fixed_point(weight: Int4Weight, base: Int4Scheme) -> Tensor:
    scheme = Int4Scheme(weight.group_size, base.scale_divisor, base.q_min)
    again = quantize(dequantize(weight, weight.scale.dtype), scheme)
    same_codes = again.packed.eq(weight.packed).unflatten(1, (-1, weight.group_size // 8)).all(-1)
    return same_codes & again.scale.eq(weight.scale)


def _verdict(convention: Convention) -> str:
    # Of groups made by /7.5 half have their extreme at -8, and the others at 7.
    if convention.kimi_share >= 0.9 and not convention.minus_8_share:
        return "kimi (/7)"
    if convention.minus_8_share >= 0.25 and convention.below_7_share <= 0.01:
        return "rtn (/7.5)"
    return "neither"
