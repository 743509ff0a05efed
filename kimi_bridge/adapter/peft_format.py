"""LoRA adapters in PEFT's form: names, ranks, scales, and the one scale that vLLM knows.

A module `M` with weight `[out, in]` has `base_model.model.M.lora_A.weight` `[r, in]` and `....lora_B.weight`
`[out, r]`; what is added to the weight is `scale * B A`, with `scale = alpha / r` of that module. PEFT finds
both in `rank_pattern` and `alpha_pattern`. vLLM knows neither: it takes the `lora_alpha / r` of the whole
adapter, so an adapter for vLLM has every module's scale in its B, and scale 1.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kimi_bridge.adapter.patterns import by_kind, rank_patterns, target_modules
from kimi_bridge.adapter.peft_config import CONFIG_NAME, by_pattern, read_config
from kimi_bridge.checkpoint.families import TEXT_PREFIX
from kimi_bridge.checkpoint.files import destination, plain_disk_errors, write_json
from kimi_bridge.checkpoint.reader import CheckpointReader, Slice
from kimi_bridge.checkpoint.shards import TensorInfo
from kimi_bridge.checkpoint.triplets import SCALE_DTYPES
from kimi_bridge.checkpoint.writer import CheckpointWriter, TensorSpec
from kimi_bridge.errors import CheckpointError

WEIGHTS_NAME = "adapter_model.safetensors"
Target = Literal["vllm", "peft"]
"""Who will read an adapter: vLLM (one scale, 1) or PEFT (each module's own)."""

Part = Literal["A", "B"]
_PARTS: tuple[Part, Part] = ("A", "B")

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_NOTES = "kimi_bridge"
# What vLLM accepts and never applies, and Megatron's name for it.
_IGNORED = {"kv_b_proj": "linear_kv_up_proj", "gate": "router"}
_WARNING = (
    "the adapter is on {name} ({count} modules), which vLLM accepts and never applies, and refuses where this"
    " library is installed: leave {in_megatron} out of target_modules, or merge the adapter to serve it"
)


class ModuleSpec(NamedTuple):
    """One adapted module: rank, alpha and dtype of its pair, and the `(out, in)` of its weight."""

    rank: int
    alpha: float
    dtype: torch.dtype
    shape: tuple[int, int]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass
class AdapterPlan:
    """What an adapter's files hold, known before any tensor is: config, tensors, and notes on the origin."""

    config: LoraConfig
    specs: list[TensorSpec]
    notes: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class Adapter:
    """An adapter's folder, checked when it is opened; tensors are read when they are asked for.

    `modules` are named as the checkpoint's weights, without `.weight`; names of a text-only model
    (`model.layers...`) get the prefix `language_model.`.

    Raises:
        CheckpointError: a missing, damaged or truncated file, half a pair or none, two pairs for one module,
            ranks that disagree, a kind of adapter whose delta is not `scale * B A`.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{path} is no folder: give the one that holds {CONFIG_NAME}.")
        self.config = read_config(self.path)
        self._reader = CheckpointReader(self.path)
        self.notes = _read_notes(self.path)
        self._pairs = _pairs(self._reader)
        self.modules = {module: self._spec(module) for module in self._pairs}

    def infos(self, module: str) -> tuple[TensorInfo, TensorInfo]:
        """Where A and B of a module lie in the file."""
        name_a, name_b = self._pairs[module]
        return self._reader.info(name_a), self._reader.info(name_b)

    def tensors(self, module: str) -> tuple[Tensor, Tensor]:
        """A `[r, in]` and B `[out, r]`. Raises CheckpointError for NaN or Inf."""
        return self.tensor(module, "A"), self.tensor(module, "B")

    def tensor(self, module: str, part: Part) -> Tensor:
        """One of the two, without reading the other. Raises CheckpointError for NaN or Inf."""
        name = self._pairs[module][_PARTS.index(part)]
        tensor = self._reader.tensor(name)
        check_finite(name, tensor, self.path)
        return tensor

    def _spec(self, module: str) -> ModuleSpec:
        a, b = self.infos(module)
        name = self._pairs[module][0].removeprefix(_PREFIX).removesuffix(_A)
        rank = by_pattern(self.config.rank_pattern, name, self.config.r)
        alpha = by_pattern(self.config.alpha_pattern, name, self.config.lora_alpha)
        if len(a.shape) != 2 or len(b.shape) != 2 or a.dtype != b.dtype or a.dtype not in SCALE_DTYPES:
            raise CheckpointError(
                f"{module} has lora_A {a.dtype} {list(a.shape)} and lora_B {b.dtype} {list(b.shape)} in"
                f" {self.path}: two matrices in bfloat16, float16 or float32 belong there; export the adapter"
                " again."
            )
        if not a.shape[0] == b.shape[1] == rank:
            raise CheckpointError(
                f"{module}: lora_A is {list(a.shape)}, lora_B {list(b.shape)}, and {CONFIG_NAME} says rank"
                f" {rank}: they disagree, so weights and config of {self.path} do not belong together."
            )
        # rsLoRA divides by sqrt(r): https://arxiv.org/abs/2312.03732
        alpha = alpha * math.sqrt(rank) if self.config.use_rslora else alpha
        return ModuleSpec(rank, alpha, a.dtype, (b.shape[0], a.shape[1]))


def load_adapter(path: str | Path) -> Adapter:
    """Opens the adapter in a folder. Raises CheckpointError, see `Adapter`."""
    return Adapter(path)


def plan_adapter(
    modules: Mapping[str, ModuleSpec],
    base: CheckpointReader,
    target: Target = "vllm",
    *,
    rank: int | None = None,
    alpha: float | None = None,
    dropout: float = 0.0,
    base_name: str | None = None,
    notes: Mapping[str, Any] | None = None,
) -> AdapterPlan:
    """Config and tensors of an adapter for `modules` of the checkpoint `base`.

    For "peft", `rank` and `alpha` (default: those of the first module) are the config's `r` and
    `lora_alpha`, and patterns state what differs. For "vllm" `r` is the largest rank, and alpha equals the
    rank everywhere: pass each B through `fold_scale`.

    Raises:
        CheckpointError: no modules, an unknown target, modules that `base` does not have.
    """
    if target not in get_args(Target):
        raise CheckpointError(f"unknown kind of reader {target!r}: choose vllm or peft.")
    if not modules:
        raise CheckpointError("the adapter has no modules: nothing was trained.")
    for module, spec in modules.items():
        _check_spec(module, spec)
    check_base(modules, base, "the model")
    first = next(iter(modules.values()))
    if target == "vllm":
        rank = max(spec.rank for spec in modules.values())
        alpha = rank
        alphas: dict[str, float] = {module: spec.rank for module, spec in modules.items()}
    else:
        rank, alpha = rank or first.rank, first.alpha if alpha is None else alpha
        alphas = {module: spec.alpha for module, spec in modules.items()}
    config = LoraConfig(
        base_model_name_or_path=str(base_name or base.path),
        task_type="CAUSAL_LM",
        inference_mode=True,
        r=rank,
        lora_alpha=_plain(alpha),  # type: ignore[arg-type]  # peft's hint says int, its code takes any
        lora_dropout=dropout,
        target_modules=target_modules(modules, linear_modules(base).keys() - modules.keys()),
        rank_pattern={
            key: int(value)
            for key, value in rank_patterns({m: spec.rank for m, spec in modules.items()}, rank).items()
        },
        alpha_pattern={key: _plain(value) for key, value in rank_patterns(alphas, alpha).items()},
    )
    specs = [
        TensorSpec(
            tensor_name(module, part),
            modules[module].dtype,
            _part_shape(modules[module], part),
        )
        for experts in by_kind(modules)
        for part in _PARTS
        for module in experts
    ]
    warnings = []
    for name, in_megatron in _IGNORED.items() if target == "vllm" else ():
        if count := sum(module.endswith(f".{name}") for module in modules):
            warnings.append(_WARNING.format(name=name, count=count, in_megatron=in_megatron))
    return AdapterPlan(config, specs, {**(notes or {}), "base": fingerprint(base)}, warnings)


def _check_spec(module: str, spec: ModuleSpec) -> None:
    whole = type(spec.rank) is int and spec.rank > 0
    if not whole or not math.isfinite(spec.alpha) or spec.dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"{module} has rank {spec.rank!r}, alpha {spec.alpha!r} and {spec.dtype}: a rank from 1 on, a"
            " finite alpha and bfloat16, float16 or float32 are needed."
        )


def save_adapter(
    dst: str | Path, plan: AdapterPlan, tensors: Iterable[tuple[str, Tensor]], overwrite: bool = False
) -> None:
    """Writes `adapter_model.safetensors` and `adapter_config.json`, tensor by tensor in any order.

    Nothing appears under its final name before all of it is there.

    Raises:
        CheckpointError: a tensor that the plan does not have or that is missing at the end, NaN or Inf, a
            folder that already holds weights (unless `overwrite`).
    """
    with adapter_writer(dst, plan, overwrite) as writer:
        for name, tensor in tensors:
            check_finite(name, tensor, "the model")
            writer.write(name, tensor)
        finish(writer, plan)


def adapter_writer(dst: str | Path, plan: AdapterPlan, overwrite: bool = False) -> CheckpointWriter:
    """Writes the tensors of a plan; `finish` makes an adapter of them.

    Raises:
        CheckpointError: a folder in use, or one with weights that are no adapter, which are not replaced.
    """
    others = [path.name for path in destination(dst).glob("*.safetensors") if path.name != WEIGHTS_NAME]
    if others:
        raise CheckpointError(
            f"{dst} holds {sorted(others)[0]}, which is no adapter: choose another folder for the adapter."
        )
    notes = json.dumps(plan.notes)
    return CheckpointWriter(dst, plan.specs, None, overwrite, stem="adapter_model", metadata={_NOTES: notes})


def finish(writer: CheckpointWriter, plan: AdapterPlan) -> None:
    """Puts tensors and config in place. An older config goes first: it must never stand by new tensors."""
    target, content = writer.dst / CONFIG_NAME, config_dict(plan.config)
    with plain_disk_errors(target):
        target.unlink(missing_ok=True)
        writer.finish()
        write_json(target, content)


def config_dict(config: LoraConfig) -> dict[str, Any]:
    """What peft writes into `adapter_config.json`, in an order that does not change between runs."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        content = json.loads((Path(folder) / CONFIG_NAME).read_text())
    return content | {"target_modules": sorted(content["target_modules"])}


def _part_shape(spec: ModuleSpec, part: Part) -> tuple[int, int]:
    return (spec.rank, spec.shape[1]) if part == "A" else (spec.shape[0], spec.rank)


def tensor_name(module: str, part: Part) -> str:
    """The name of a module's A or B in `adapter_model.safetensors`."""
    return f"{_PREFIX}{module}{_A if part == 'A' else _B}"


def fold_scale(b: Tensor, scale: float) -> Tensor:
    """`scale * B`, computed in float32 and rounded once to B's dtype."""
    return b if scale == 1 else (b.float() * scale).to(b.dtype)


def linear_modules(base: CheckpointReader) -> dict[str, tuple[int, ...]]:
    """The modules of the text model that have a matrix to adapt, and its shape: no norms, no embedding."""
    if base not in _LINEARS:
        _LINEARS[base] = {
            name.removesuffix(".weight"): shape
            for name, shape in _text_shapes(base)
            if len(shape) == 2 and name.endswith(".weight") and not name.endswith("embed_tokens.weight")
        }
    return _LINEARS[base]


def check_base(modules: Mapping[str, ModuleSpec], base: CheckpointReader, whose: str) -> None:
    """Raises CheckpointError for a module that the checkpoint lacks or has in another shape."""
    linears = linear_modules(base)
    for module, spec in modules.items():
        plain = f"{module.removeprefix(TEXT_PREFIX)}.weight"
        if module not in linears and (f"{module}.weight" in base.weights() or plain in base.weights()):
            raise CheckpointError(
                f"{whose} adapts {plain.removesuffix('.weight')} of {base.path}: only the linear layers of"
                " the text model can be adapted."
            )
        if module not in linears:
            raise CheckpointError(
                f"{whose} adapts {module}, which {base.path} does not have: it belongs to another base model."
            )
        shape = linears[module]
        if shape != tuple(spec.shape):
            raise CheckpointError(
                f"{whose} adapts {module} as {list(spec.shape)}, which is {list(shape)} in {base.path}: it"
                " belongs to another base model."
            )


def check_fingerprint(adapter: Adapter, base: CheckpointReader) -> None:
    """Raises CheckpointError for an adapter that was exported from another checkpoint than `base`.

    Adapters of other tools do not say where they come from; their names and shapes are all there is.
    """
    noted = adapter.notes.get("base")
    if noted is not None and noted != fingerprint(base):
        raise CheckpointError(
            f"{adapter.path} was trained on another base model than {base.path} (its config names"
            f" {adapter.config.base_model_name_or_path}): use the checkpoint that it was trained on."
        )


def fingerprint(base: CheckpointReader) -> str:
    """Of a checkpoint's text model: names, shapes, the norms, and the first row of what is never INT4.

    The same for an INT4 checkpoint, what it dequantizes to, and what it was quantized from; another one after
    a merge, but for one into experts alone.
    """
    if base not in _FINGERPRINTS:
        digest = hashlib.sha256()
        for name, shape in sorted(_text_shapes(base)):
            digest.update(f"{name} {shape}\n".encode())
            if len(shape) == 1:
                digest.update(base.tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes())
            elif ".experts." not in name:
                row = base.weight(name, rows=Slice(0, 1), dtype=torch.float32)
                digest.update((row + 0.0).view(torch.uint8).numpy().tobytes())
        _FINGERPRINTS[base] = digest.hexdigest()
    return _FINGERPRINTS[base]


# Both take a moment for 70,000 weights, and a sync asks at every step.
_LINEARS: WeakKeyDictionary[CheckpointReader, dict[str, tuple[int, ...]]] = WeakKeyDictionary()
_FINGERPRINTS: WeakKeyDictionary[CheckpointReader, str] = WeakKeyDictionary()


def _text_shapes(base: CheckpointReader) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in base.weight_names():
        if name.startswith(TEXT_PREFIX):
            yield name, base.shape(name)


def check_finite(name: str, tensor: Tensor, where: object) -> None:
    """Raises CheckpointError for NaN or Inf."""
    if not tensor.isfinite().all():
        raise CheckpointError(
            f"{name} of {where} holds NaN or Inf: the training has diverged, or the file is damaged; go back"
            " to an earlier adapter."
        )


def _plain(value: float) -> float:
    """8 instead of 8.0 in the JSON, as other tools write it."""
    return int(value) if float(value).is_integer() else value


def _read_notes(folder: Path) -> dict[str, Any]:
    """What `save_adapter` noted; adapters of other tools have no notes."""
    try:
        with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
            notes = json.loads((file.metadata() or {}).get(_NOTES, "{}"))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / WEIGHTS_NAME} cannot be read ({error}): export the adapter again."
        ) from error
    if not isinstance(notes, dict):
        raise CheckpointError(f"{folder / WEIGHTS_NAME} has notes that are no object: export it again.")
    return notes


def _pairs(reader: CheckpointReader) -> dict[str, tuple[str, str]]:
    """The stored names of A and B by module."""
    pairs: dict[str, tuple[str, str]] = {}
    for name in reader.names():
        module = name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)
        if not name.startswith(_PREFIX) or not name.endswith((_A, _B)):
            raise CheckpointError(
                f"{name} in {reader.path} is no {_PREFIX}MODULE{_A} or {_B}: only plain LoRA is supported."
            )
        stem = _PREFIX + module
        for half in (stem + _A, stem + _B):
            if half not in reader:
                raise CheckpointError(
                    f"{half} is missing in {reader.path}, but {name} is there: export the adapter again."
                )
        if not module.startswith(TEXT_PREFIX):
            module = TEXT_PREFIX + module
        pair = stem + _A, stem + _B
        if pairs.setdefault(module, pair) != pair:
            raise CheckpointError(
                f"{reader.path} adapts {module} twice, with {TEXT_PREFIX} in its name and without: remove"
                " one of them."
            )
    if not pairs:
        raise CheckpointError(f"{reader.path} holds no pair of lora_A and lora_B: export the adapter again.")
    return pairs
