"""Adapters written and read: round trips, peft's own reading of the config, and peft's own arithmetic."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_folders import contents, same_bits
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file

from kimi_bridge.adapter import (
    ModuleSpec,
    fold_scale,
    load_adapter,
    merge_adapter,
    peft_format,
    plan_adapter,
    save_adapter,
)
from kimi_bridge.adapter.peft_format import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    Target,
    check_base,
    check_fingerprint,
    fingerprint,
    linear_modules,
    tensor_name,
)
from kimi_bridge.checkpoint import CheckpointReader, dequantize_checkpoint
from kimi_bridge.errors import CheckpointError
from tests.adapter.adapters import (
    DENSE,
    EXPERT,
    LAYERS,
    MODULES,
    O_PROJ,
    Q_A,
    SHARED,
    adapter,
    edit_config,
    edit_weights,
    random_pairs,
    specs_of,
    write,
)
from tests.megatron.reference import reference_model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_for_peft(kimi: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    specs = specs_of(kimi, ranks={O_PROJ: 16, EXPERT: 1}, alphas={SHARED: 2.5, EXPERT: 7.0}, dtype=dtype)
    pairs = random_pairs(specs)
    write(tmp_path / "lora", kimi, specs, pairs, dropout=0.1, base_name="org/base", notes={"step": 3})
    read = load_adapter(tmp_path / "lora")
    assert read.modules == specs
    assert read.notes == {"base": fingerprint(CheckpointReader(kimi)), "step": 3}
    for module, pair in pairs.items():
        assert all(same_bits(a, b) for a, b in zip(read.tensors(module), pair, strict=True))
    config = json.loads((tmp_path / "lora" / CONFIG_NAME).read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.1)
    assert (config["base_model_name_or_path"], config["task_type"]) == ("org/base", "CAUSAL_LM")
    assert {p.name for p in (tmp_path / "lora").iterdir()} == {CONFIG_NAME, WEIGHTS_NAME}
    names = set(load_file(tmp_path / "lora" / WEIGHTS_NAME))
    assert f"base_model.model.{EXPERT}.lora_A.weight" in names
    assert len(names) == 2 * len(MODULES)
    write(tmp_path / "again", kimi, specs, pairs, dropout=0.1, base_name="org/base", notes={"step": 3})
    assert contents(tmp_path / "again") == contents(tmp_path / "lora")


def test_round_trip_for_vllm(kimi: Path, tmp_path: Path) -> None:
    """vLLM takes lora_alpha / r of the whole adapter: that is 1, and so is every module's scale."""
    specs = specs_of(kimi, ranks={Q_A: 16}, alphas={SHARED: 2.5, EXPERT: 7.0})
    pairs = random_pairs(specs)
    write(tmp_path / "lora", kimi, specs, pairs, "vllm")
    config = json.loads((tmp_path / "lora" / CONFIG_NAME).read_text())
    assert (config["r"], config["lora_alpha"]) == (16, 16)
    read = load_adapter(tmp_path / "lora")
    for module, (a, b) in pairs.items():
        assert read.modules[module].scale == 1
        assert read.modules[module].rank == specs[module].rank
        folded = (b.float() * (specs[module].alpha / specs[module].rank)).bfloat16()
        assert same_bits(read.tensors(module)[0], a)
        assert same_bits(read.tensors(module)[1], folded)


def test_fold_scale() -> None:
    b = torch.randn(5, 3).bfloat16()
    assert fold_scale(b, 1.0) is b
    assert same_bits(fold_scale(b, 2.0), b * 2)
    assert same_bits(fold_scale(b, 1 / 3), (b.double() / 3).bfloat16())


def test_the_fingerprint_is_that_of_the_text_model(bases: Path, tmp_path: Path) -> None:
    dequantize_checkpoint(bases / "kimi", tmp_path / "plain", max_shard_size="300KB")
    prints = {name: fingerprint(CheckpointReader(bases / name)) for name in ("kimi", "kimi_bf16", "other")}
    assert prints["kimi"] == prints["kimi_bf16"] == fingerprint(CheckpointReader(tmp_path / "plain"))
    assert prints["kimi"] != prints["other"]
    lora = load_adapter(adapter(tmp_path / "lora", bases / "kimi"))
    check_fingerprint(lora, CheckpointReader(bases / "kimi_bf16"))
    with pytest.raises(CheckpointError, match="trained on another base model"):
        check_fingerprint(lora, CheckpointReader(bases / "other"))
    edit_weights(tmp_path / "lora", lambda tensors: None)
    check_fingerprint(load_adapter(tmp_path / "lora"), CheckpointReader(bases / "other"))


def text_only(folder: Path) -> Path:
    """As an adapter of the text model alone is named."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("language_model.", "")] = tensors.pop(name)

    edit_weights(folder, rename)
    return folder


ATTENTION = [Q_A, O_PROJ, LAYERS + "2.self_attn.kv_b_proj"]


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("target", ["peft", "vllm"])
@pytest.mark.parametrize("modules", [ATTENTION, [*ATTENTION, DENSE, SHARED]], ids=["attention", "mlp"])
def test_peft_itself_merges_the_same(
    kimi: Path, tmp_path: Path, modules: list[str], target: Target, rslora: bool
) -> None:
    """Ranks and scales of their own, found by PEFT in the patterns; float32, so that nothing is rounded."""
    ranks, alphas = {Q_A: 16, SHARED: 2}, {O_PROJ: 3.0, DENSE: 32.0, SHARED: 5.0}
    specs = specs_of(kimi, modules, ranks, alphas, torch.float32)
    folder = text_only(write(tmp_path / "lora", kimi, specs, random_pairs(specs), target))
    edit_config(folder, use_rslora=rslora)
    read, base = load_adapter(folder), CheckpointReader(kimi)
    model = reference_model(kimi)
    if DENSE in modules:
        # For this type PEFT takes every up_proj, a dense layer's too, for a part of transformers' fused
        # experts, and refuses it alone.
        model.config.model_type = "unknown"
    peft_model = PeftModel.from_pretrained(model, str(folder)).eval()
    adapted = {name for name, module in peft_model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {"base_model.model." + inner(module) for module in modules}
    merged = peft_model.merge_and_unload().state_dict()
    merge_adapter(kimi, folder, tmp_path / "out", int4=False)
    ours = CheckpointReader(tmp_path / "out")
    for module in modules:
        (a, b), spec = read.tensors(module), read.modules[module]
        scale = specs[module].scale if target == "peft" else 1.0
        assert spec.scale == pytest.approx(scale * math.sqrt(spec.rank) if rslora else scale)
        expected = base.weight(module + ".weight").double() + spec.scale * (b.double() @ a.double())
        theirs = merged[inner(module) + ".weight"].double()
        assert (theirs - expected).abs().max() < 1e-5, module
        assert (ours.tensor(module + ".weight") - theirs).abs().max() <= 2**-8 * theirs.abs().max()
    untouched = LAYERS + "1.self_attn.q_a_proj.weight"
    assert torch.equal(merged[inner(untouched)], base.tensor(untouched).float())


def inner(name: str) -> str:
    return name.removeprefix("language_model.")


def test_peft_targets_what_was_adapted(kimi: Path, tmp_path: Path) -> None:
    """In the full model, whose names have the prefix, and in the text model, whose names have not."""
    adapter(tmp_path / "lora", kimi)
    config = LoraConfig.from_pretrained(str(tmp_path / "lora"))
    for module in linear_modules(CheckpointReader(kimi)):
        for name in (module, module.removeprefix("language_model.")):
            assert bool(check_target_module_exists(config, name)) == (module in MODULES), name


def test_a_plan_needs_modules_of_its_base(kimi: Path) -> None:
    base, specs = CheckpointReader(kimi), specs_of(kimi, [O_PROJ])
    for modules, message in (
        ({}, "has no modules"),
        ({O_PROJ.replace("layers.1", "layers.9"): specs[O_PROJ]}, "does not have: it belongs to another"),
        ({O_PROJ: specs[O_PROJ]._replace(shape=(64, 128))}, r"as \[64, 128\], which is \[128, 64\]"),
        ({LAYERS + "0.input_layernorm": specs[O_PROJ]}, "only the linear layers of the text model"),
        ({"language_model.model.embed_tokens": specs[O_PROJ]}, "only the linear layers"),
        ({"vision_tower.encoder.blocks.0.wqkv": specs[O_PROJ]}, r"adapts vision_tower\.\S+ of .*only the"),
        ({O_PROJ: specs[O_PROJ]._replace(rank=0)}, "a rank from 1 on"),
        ({O_PROJ: specs[O_PROJ]._replace(alpha=float("nan"))}, "a finite alpha"),
        ({O_PROJ: specs[O_PROJ]._replace(dtype=torch.int8)}, "bfloat16, float16 or float32"),
    ):
        with pytest.raises(CheckpointError, match=message):
            plan_adapter(modules, base)
    with pytest.raises(CheckpointError, match="unknown kind of reader 'sglang': choose vllm or peft"):
        plan_adapter(specs, base, "sglang")  # type: ignore[arg-type]
    check_base({"language_model.lm_head": ModuleSpec(1, 1, torch.bfloat16, (1280, 128))}, base, "x")


def test_saving_is_all_or_nothing(kimi: Path, tmp_path: Path) -> None:
    specs = specs_of(kimi, [O_PROJ])
    plan = plan_adapter(specs, CheckpointReader(kimi), "peft")
    a, b = random_pairs(specs)[O_PROJ]
    name_a, name_b = tensor_name(O_PROJ, "A"), tensor_name(O_PROJ, "B")
    poisoned = b.clone()
    poisoned[-1, -1] = float("inf")
    for tensors, message in (
        ([(name_a, a)], "1 of 2 tensors were not written"),
        ([(name_a, a), (name_b, poisoned)], r"lora_B\.weight of the model holds NaN or Inf"),
        ([(name_a, a), (name_b, b.T)], "but the plan of"),
        ([(name_a, a), ("other", b)], "not in the plan"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save_adapter(tmp_path / "lora", plan, tensors)
        assert not (tmp_path / "lora").exists()
    save_adapter(tmp_path / "lora", plan, [(name_b, b), (name_a, a)])
    before = contents(tmp_path / "lora")
    with pytest.raises(CheckpointError, match=r"already holds adapter_model.safetensors"):
        save_adapter(tmp_path / "lora", plan, [(name_a, a), (name_b, b)])
    save_adapter(tmp_path / "lora", plan, [(name_a, a), (name_b, b)], overwrite=True)
    assert contents(tmp_path / "lora") == before


def test_overwriting_never_mixes_two_adapters(
    kimi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = specs_of(kimi, [O_PROJ])
    a, b = random_pairs(specs)[O_PROJ]
    tensors = [(tensor_name(O_PROJ, "A"), a), (tensor_name(O_PROJ, "B"), b)]
    save_adapter(tmp_path / "lora", plan_adapter(specs, CheckpointReader(kimi), "peft"), tensors)
    other = {O_PROJ: specs[O_PROJ]._replace(alpha=64)}

    def dies(*_args: object) -> None:
        raise KeyboardInterrupt

    # Between the tensors and the config, as a kill could.
    monkeypatch.setattr(peft_format, "write_json", dies)
    with pytest.raises(KeyboardInterrupt):
        save_adapter(
            tmp_path / "lora", plan_adapter(other, CheckpointReader(kimi), "peft"), tensors, overwrite=True
        )
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        load_adapter(tmp_path / "lora")


def test_a_model_is_not_overwritten_by_an_adapter(kimi: Path, tmp_path: Path) -> None:
    shutil.copytree(kimi, tmp_path / "model")
    before = contents(tmp_path / "model")
    specs = specs_of(kimi, [O_PROJ])
    a, b = random_pairs(specs)[O_PROJ]
    tensors = [(tensor_name(O_PROJ, "A"), a), (tensor_name(O_PROJ, "B"), b)]
    plan = plan_adapter(specs, CheckpointReader(kimi))
    with pytest.raises(CheckpointError, match="which is no adapter"):
        save_adapter(tmp_path / "model", plan, tensors, overwrite=True)
    assert contents(tmp_path / "model") == before
