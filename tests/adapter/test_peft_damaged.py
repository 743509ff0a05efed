"""Folders that are no adapter, or none that this library can merge: one sentence each, and no guesses."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kimi_bridge.adapter import load_adapter
from kimi_bridge.adapter.peft_format import CONFIG_NAME, WEIGHTS_NAME, tensor_name
from kimi_bridge.errors import CheckpointError
from tests.adapter.adapters import EXPERT, O_PROJ, Q_A, adapter, edit_config, edit_weights

A, B = tensor_name(EXPERT, "A"), tensor_name(EXPERT, "B")


@pytest.fixture
def lora(kimi: Path, tmp_path: Path) -> Path:
    return adapter(tmp_path / "lora", kimi)


def config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


def weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_weights(folder, lambda tensors: (edit(tensors), None)[1])


def write_config(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / CONFIG_NAME).write_text(text) and None


def pickled(folder: Path) -> None:
    (folder / WEIGHTS_NAME).rename(folder / "adapter_model.bin")


def notes(text: str) -> Callable[[Path], None]:
    return lambda folder: edit_weights(folder, lambda tensors: None, {"kimi_bridge": text})


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "is no folder: give the one that holds adapter_config.json"),
    "no config": (lambda f: (f / CONFIG_NAME).unlink(), "has no adapter_config.json"),
    "config is no JSON": (write_config("{"), "not valid JSON"),
    "config is a list": (write_config("[]"), "describes a None adapter"),
    "a key twice": (write_config('{"peft_type": "LORA", "peft_type": "LORA"}'), "stands there twice"),
    "another kind": (config(peft_type="IA3"), "describes a IA3 adapter: only LORA"),
    "DoRA": (config(use_dora=True), "sets use_dora, which is not supported"),
    "lora_bias": (config(lora_bias=True), "sets lora_bias"),
    "bias": (config(bias="all"), "sets bias='all'"),
    "modules_to_save": (config(modules_to_save=["lm_head"]), "sets modules_to_save"),
    "target_parameters": (config(target_parameters=["experts.w"]), "sets target_parameters"),
    "layer_replication": (config(layer_replication=[[0, 2]]), "sets layer_replication"),
    "aLoRA": (config(alora_invocation_tokens=[1, 2]), "sets alora_invocation_tokens"),
    "PiSSA": (config(init_lora_weights="pissa_niter_4"), "a base of its own: convert it"),
    "rank 0": (config(r=0), "has the rank 0: ranks are whole numbers from 1 on"),
    "rank is text": (config(r="8"), "has the rank '8'"),
    "rank is a float": (config(r=4.0), "has the rank 4.0"),
    "rank of one is 0": (config(rank_pattern={".*": 0}), "has the rank 0"),
    "alpha is text": (config(lora_alpha="8"), "has the alpha '8', which is no number"),
    "alpha is NaN": (config(lora_alpha=float("nan")), "has the alpha nan"),
    "alpha is huge": (config(lora_alpha=10**400), "has the alpha 1000"),
    "pattern is null": (config(alpha_pattern={"o_proj": None}), "has the alpha None"),
    "pattern is a list": (config(rank_pattern=["o_proj"]), "has a rank_pattern that is no object"),
    "pattern is a number": (config(alpha_pattern=5), "has a alpha_pattern that is no object"),
    "pattern is broken": (config(alpha_pattern={"[": 4}), r"the key '\[' in alpha_pattern"),
    "another rank": (config(r=8), "config.json says rank 8: they disagree"),
    "another rank of one": (config(rank_pattern={"o_proj": 2}), f"{O_PROJ}: .* says rank 2: they disagree"),
    "no weights": (lambda f: (f / WEIGHTS_NAME).unlink(), "holds no weights"),
    "a pickle": (pickled, "adapter_model.bin, a pickle file"),
    "truncated": (lambda f: os.truncate(f / WEIGHTS_NAME, 4000), "is truncated"),
    "no header": (lambda f: os.truncate(f / WEIGHTS_NAME, 4), "truncated"),
    "garbage": (lambda f: (f / WEIGHTS_NAME).write_bytes(b"\xff" * 100), "no safetensors file"),
    "empty": (lambda f: save_file({}, f / WEIGHTS_NAME), "holds no pair"),
    "notes are no JSON": (notes("{"), "cannot be read"),
    "notes are deep": (notes("[" * 100_000), "cannot be read"),
    "notes are a list": (notes("[]"), "notes that are no object"),
    "no B": (weights(lambda t: t.pop(B)), rf"{EXPERT}\.lora_B\.weight is missing .* but .*lora_A"),
    "no A": (weights(lambda t: t.pop(A)), rf"{EXPERT}\.lora_A\.weight is missing .* but .*lora_B"),
    "an embedding": (
        weights(lambda t: t.update({"base_model.model.e.lora_embedding_A": t.pop(A), "x": t.pop(B)})),
        r"(lora_embedding_A|x) in .* is no base_model\.model\.MODULE",
    ),
    "a DoRA vector": (
        weights(lambda t: t.update({f"base_model.model.{Q_A}.lora_magnitude_vector.weight": torch.ones(3)})),
        "lora_magnitude_vector.weight in .* only plain LoRA",
    ),
    "no prefix": (
        weights(lambda t: t.update({n.removeprefix("base_model.model."): t.pop(n) for n in (A, B)})),
        "is no base_model",
    ),
    "other names": (
        weights(lambda t: t.update({n.replace(".weight", ".default.weight"): t.pop(n) for n in (A, B)})),
        "is no base_model",
    ),
    "transposed": (weights(lambda t: t.update({B: t[B].T.contiguous()})), "they disagree"),
    "one dimension": (weights(lambda t: t.update({B: t[B].flatten()})), "two matrices in bfloat16, float16"),
    "two dtypes": (weights(lambda t: t.update({B: t[B].float()})), "two matrices in bfloat16, float16"),
    "integers": (weights(lambda t: t.update({A: t[A].int(), B: t[B].int()})), "two matrices in bfloat16"),
    "float8": (
        weights(lambda t: t.update({n: t[n].to(torch.float8_e4m3fn) for n in (A, B)})),
        "two matrices in bfloat16",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_refused(lora: Path, damage: str) -> None:
    spoil, message = DAMAGES[damage]
    spoil(lora)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_adapter(lora)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [A, B])
def test_nan_is_found_when_it_is_read(lora: Path, name: str, value: float) -> None:
    edit_weights(lora, lambda tensors: tensors[name].view(-1)[5:6].fill_(value))
    read = load_adapter(lora)
    read.tensors(O_PROJ)
    with pytest.raises(CheckpointError, match=f"{name} of .*lora holds NaN or Inf"):
        read.tensors(EXPERT)


def test_both_names_of_one_module(lora: Path) -> None:
    """With the prefix and without: two updates of one weight, of which one would be lost."""

    def twice(tensors: dict[str, torch.Tensor]) -> None:
        for name in (A, B):
            tensors[name.replace("language_model.", "")] = tensors[name].clone()

    edit_weights(lora, twice)
    with pytest.raises(CheckpointError, match=f"adapts {EXPERT} twice"):
        load_adapter(lora)


def test_what_other_tools_leave_out_is_fine(lora: Path) -> None:
    """Older configs have no patterns; other tools leave no notes."""
    content = json.loads((lora / CONFIG_NAME).read_text())
    kept = {key: content[key] for key in ("peft_type", "r", "lora_alpha", "target_modules")}
    (lora / CONFIG_NAME).write_text(json.dumps(kept))
    edit_weights(lora, lambda tensors: None)
    read = load_adapter(lora)
    assert (read.notes, read.modules[EXPERT].rank, read.modules[EXPERT].scale) == ({}, 4, 2)
