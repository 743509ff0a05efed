"""What merging writes, against plain torch: values, untouched bits, and the report's figures."""

import json
import math
from pathlib import Path

import pytest
import torch
from checkpoint_folders import contents, same_bits
from convert_runs import assert_same, run_with_a_process
from torch import Tensor

from kimi_bridge.adapter import MergeSummary, load_adapter, merge_adapter
from kimi_bridge.adapter.merge import plan_merge
from kimi_bridge.checkpoint import (
    CheckpointReader,
    dequantize_checkpoint,
    quantize_checkpoint,
    tensor_kind,
    verify_checkpoints,
)
from kimi_bridge.checkpoint import convert as convert_module
from kimi_bridge.conversion.merge import _energy, exact_rows
from kimi_bridge.int4 import KIMI_QAT, RTN, Int4Weight, quantize, requantize
from tests.adapter.adapters import (
    EXPERT,
    EXPERTS,
    MODULES,
    O_PROJ,
    Q_A,
    adapter,
    edit_weights,
    modules_of,
    random_pairs,
    specs_of,
    write,
)

CONVENTIONS = ["kimi", "rtn", "mixed"]
ROWS = 128


def exact_merge(base: CheckpointReader, folder: Path, module: str) -> Tensor:
    """By the words of merge_adapter's docstring, on tensors as the files have them."""
    lora = load_adapter(folder)
    a, b = (t.to(torch.float32) for t in lora.tensors(module))
    scale = lora.config.lora_alpha / lora.config.r
    weight = base.weight(module + ".weight").to(torch.float32)
    blocks = [b[i : i + ROWS] @ a for i in range(0, len(b), ROWS)]
    return weight + torch.cat(blocks) * scale


def double_merge(base: CheckpointReader, folder: Path, module: str) -> Tensor:
    lora = load_adapter(folder)
    a, b = (t.to(torch.float64) for t in lora.tensors(module))
    weight = base.weight(module + ".weight").to(torch.float64)
    return weight + lora.config.lora_alpha / lora.config.r * (b @ a)


def same_int4(a: Int4Weight, b: Int4Weight) -> bool:
    return same_bits(a.packed, b.packed) and same_bits(a.scale, b.scale)


@pytest.fixture(scope="module", params=["peft", "vllm"])
def folders(request: pytest.FixtureRequest, bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for every convention, in PEFT's form or folded for vLLM."""
    folder = tmp_path_factory.mktemp("adapters")
    for name in (*CONVENTIONS, "kimi_bf16", "kimi_vl"):
        adapter(folder / name, bases / name, target=request.param)
    return folder


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("int4", [True, False])
def test_int4_base(bases: Path, folders: Path, tmp_path: Path, convention: str, int4: bool) -> None:
    base = CheckpointReader(bases / convention)
    summary = merge_adapter(base.path, folders / convention, tmp_path / "out", int4=int4, workers=1)
    out = CheckpointReader(tmp_path / "out")
    out.check()
    assert summary.int4 == int4
    assert set(out.weight_names()) == set(base.weight_names())
    for name in base.weight_names():
        module = name.removesuffix(".weight")
        if module not in MODULES:
            if base.is_triplet(name) and int4:
                assert same_int4(out.int4(name), base.int4(name)), name
            else:
                assert same_bits(out.tensor(name), base.weight(name)), name
            continue
        exact = exact_merge(base, folders / convention, module)
        oracle = double_merge(base, folders / convention, module)
        assert (exact - oracle).abs().max() <= 4 * 2**-24 * oracle.abs().max(), name
        merged = exact.to(torch.bfloat16)
        assert (merged - oracle).abs().max() <= 2**-8 * oracle.abs().max()
        if base.is_triplet(name) and int4:
            assert same_int4(out.int4(name), requantize(merged, base.int4(name), KIMI_QAT)), name
        else:
            assert same_bits(out.tensor(name), merged), name
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert ("quantization_config" in config["text_config"]) == int4
    source = json.loads((base.path / "config.json").read_text())
    source["text_config"].pop("quantization_config")
    config["text_config"].pop("quantization_config", None)
    assert config == source
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (base.path / "tokenizer.json").read_bytes()


def test_vllm_and_peft_forms_give_one_delta(kimi: Path, tmp_path: Path) -> None:
    """With a scale that is a power of two, folding it is exact, and so are the same bytes."""
    for target in ("peft", "vllm"):
        adapter(tmp_path / target, kimi, target=target)
        merge_adapter(kimi, tmp_path / target, tmp_path / f"out-{target}", int4=False)
    assert load_adapter(tmp_path / "peft").modules[EXPERT].scale == 2
    assert load_adapter(tmp_path / "vllm").modules[EXPERT].scale == 1
    assert verify_checkpoints(tmp_path / "out-peft", tmp_path / "out-vllm").identical


def test_every_module_has_its_own_scale_and_rank(kimi: Path, tmp_path: Path) -> None:
    ranks, alphas = {Q_A: 16, EXPERTS[3]: 2}, {O_PROJ: 3.0, EXPERT: 32.0, EXPERTS[3]: 5.0}
    specs = specs_of(kimi, ranks=ranks, alphas=alphas, dtype=torch.float32)
    pairs = random_pairs(specs)
    write(tmp_path / "lora", kimi, specs, pairs)
    merge_adapter(kimi, tmp_path / "lora", tmp_path / "out", int4=False)
    base, out = CheckpointReader(kimi), CheckpointReader(tmp_path / "out")
    for module, (a, b) in pairs.items():
        scale = alphas.get(module, 8.0) / ranks.get(module, 4)
        oracle = base.weight(module + ".weight").double() + scale * (b.double() @ a.double())
        got = out.tensor(module + ".weight").double()
        assert ((got - oracle).abs() <= 2**-8 * oracle.abs() + 1e-6).all(), module


@pytest.mark.parametrize("int4", [True, False, None])
@pytest.mark.parametrize("source", ["kimi_bf16", "kimi_vl"])
def test_bf16_base(bases: Path, folders: Path, tmp_path: Path, source: str, int4: bool | None) -> None:
    base = CheckpointReader(bases / source)
    summary = merge_adapter(base.path, folders / source, tmp_path / "out", int4=int4, scheme=RTN)
    assert summary.int4 == bool(int4)
    out, adapted = CheckpointReader(tmp_path / "out"), modules_of(base.path)
    out.check()
    for name in base.weight_names():
        module = name.removesuffix(".weight")
        expected = base.tensor(name)
        if module in adapted:
            expected = exact_merge(base, folders / source, module).to(torch.bfloat16)
        if int4 and ".mlp.experts." in name:
            assert same_int4(out.int4(name), quantize(expected, RTN)), name
        else:
            assert same_bits(out.tensor(name), expected), name


def test_merging_commutes_with_the_other_conversions(kimi: Path, tmp_path: Path) -> None:
    """Merged into bf16, and then quantized against the base: what merging into INT4 gives."""
    adapter(tmp_path / "lora", kimi)
    merge_adapter(kimi, tmp_path / "lora", tmp_path / "int4")
    merge_adapter(kimi, tmp_path / "lora", tmp_path / "bf16", int4=False)
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "again", reference=kimi)
    assert verify_checkpoints(tmp_path / "int4", tmp_path / "again").identical
    dequantize_checkpoint(kimi, tmp_path / "plain")
    # The same text model, so the adapter fits it too.
    merge_adapter(tmp_path / "plain", tmp_path / "lora", tmp_path / "third")
    assert verify_checkpoints(tmp_path / "bf16", tmp_path / "third").identical


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_an_adapter_of_zeros_gives_the_base_back(bases: Path, convention: str, tmp_path: Path) -> None:
    base = bases / convention
    adapter(tmp_path / "zero", base, gain=0.0)
    summary = merge_adapter(base, tmp_path / "zero", tmp_path / "out")
    report = verify_checkpoints(base, tmp_path / "out")
    assert report.identical
    assert report.config == "equal"
    assert not summary.warnings
    assert all((k.snr_db, k.update_snr_db, k.changed_groups) == (None, None, 0) for k in summary.kinds)


def test_untouched_groups_keep_their_bits(bases: Path, tmp_path: Path) -> None:
    """B has one row that is not zero, and A one group of columns."""
    base = CheckpointReader(bases / "mixed")
    specs = specs_of(base.path, [EXPERT])
    a, b = random_pairs(specs, gain=0.5)[EXPERT]
    a[:, :32] = 0
    b[:7] = b[8:] = 0
    write(tmp_path / "lora", base.path, specs, {EXPERT: (a, b)})
    summary = merge_adapter(base.path, tmp_path / "lora", tmp_path / "out")
    was, now = base.int4(EXPERT + ".weight"), CheckpointReader(tmp_path / "out").int4(EXPERT + ".weight")
    changed = (was.scale != now.scale) | (was.packed != now.packed).unflatten(1, (-1, 4)).any(-1)
    assert changed.nonzero().tolist() == [[7, 1]]
    (kind,) = summary.kinds
    assert (kind.groups, kind.changed_groups) == (was.scale.numel(), 1)
    (difference,) = verify_checkpoints(base.path, tmp_path / "out").differences
    assert difference.name == EXPERT + ".weight"


@pytest.mark.parametrize("int4", [True, False])
@pytest.mark.parametrize("name", ["mixed", "kimi_bf16"])
def test_the_report(bases: Path, folders: Path, tmp_path: Path, name: str, int4: bool) -> None:
    base = CheckpointReader(bases / name)
    summary = merge_adapter(base.path, folders / name, tmp_path / "out", int4=int4)
    out = CheckpointReader(tmp_path / "out")
    expected: dict[str, list[float]] = {}
    for module in MODULES:
        weight = module + ".weight"
        exact = exact_merge(base, folders / name, module).double()
        sums = expected.setdefault(tensor_kind(weight), [0.0] * 5)
        sums[0] += 1
        sums[1] += float(exact.square().sum())
        sums[2] += float((out.weight(weight).double() - exact).square().sum())
        sums[3] += float((exact - base.weight(weight).double()).square().sum())
        sums[4] += out.int4(weight).scale.numel() if out.is_triplet(weight) else 0
    assert [k.kind for k in summary.kinds] == ["attention", "experts", "shared experts", "dense mlp"]
    for kind in summary.kinds:
        weights, signal, noise, update, groups = expected[kind.kind]
        assert (kind.weights, kind.groups) == (weights, groups)
        assert kind.snr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-4)
        assert kind.update_snr_db == pytest.approx(10 * math.log10(update / noise), abs=1e-3)
    assert json.loads(json.dumps(summary.to_dict()))["kinds"][1]["kind"] == "experts"


def test_a_tiny_update_is_warned_of(kimi: Path, tmp_path: Path) -> None:
    def merged(gain: float, **options: bool) -> MergeSummary:
        folder = tmp_path / f"{gain}{options}"
        adapter(folder / "lora", kimi, gain)
        return merge_adapter(kimi, folder / "lora", folder / "out", **options)

    summary = merged(1e-6)
    (warning,) = summary.warnings
    assert "experts: the update is smaller than the INT4 grid resolves: 0 of 4,352 groups (0.0%)" in warning
    assert "signal-to-noise ratio is 0.0 dB: merge into bf16" in warning
    # Larger than bf16's grid, so that groups change, and still far below INT4's.
    (warning,) = merged(1e-3).warnings
    experts = next(k for k in merged(1.5e-3).kinds if k.kind == "experts")
    assert experts.update_snr_db is not None
    assert experts.update_snr_db < 0
    assert 0.3 < experts.changed_groups / experts.groups < 0.9
    assert not merged(0.05).warnings
    assert not merged(1e-6, int4=False).warnings
    unseen = merged(1e-6, verify=False)
    assert (unseen.kinds, unseen.groups, unseen.verified) == ([], 0, False)


@pytest.mark.parametrize("int4", [True, False])
def test_workers_and_shards_do_not_change_the_result(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, int4: bool
) -> None:
    """All files, the record with its sums included, where a thread writes alone and a process helps it."""
    base, lora = bases / "mixed", adapter(tmp_path / "lora", bases / "mixed")
    merge_adapter(base, lora, tmp_path / "one", int4=int4, workers=1, max_shard_size="200KB")
    monkeypatch.setattr(convert_module, "_PIECE_BYTES", 20_000)
    plan = plan_merge(base, lora, int4, max_shard_size="200KB")
    assert run_with_a_process(plan, tmp_path / "two") > 3
    assert_same(tmp_path / "two", contents(tmp_path / "one"))
    merge_adapter(base, lora, tmp_path / "whole", int4=int4)
    assert verify_checkpoints(tmp_path / "whole", tmp_path / "one").identical


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_do_not_change_the_result(dtype: torch.dtype) -> None:
    """At the published widths; the sums of squares too."""
    generator, before = torch.Generator(), torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        a, b = (torch.randn(*shape, generator=generator.manual_seed(1)) for shape in ((64, 7168), (128, 64)))
        base = torch.randn(128, 7168, generator=generator)
        exact = exact_rows(base.bfloat16(), a.to(dtype).float(), b.to(dtype).float(), 0.3).clone()
        results.append((exact, _energy(exact)))
    torch.set_num_threads(before)
    assert all(same_bits(exact, results[0][0]) and energy == results[0][1] for exact, energy in results)


def test_layers_named_without_the_prefix(kimi: Path, tmp_path: Path) -> None:
    """An adapter that was trained on the text model alone."""
    specs = specs_of(kimi, [O_PROJ])
    write(tmp_path / "a", kimi, specs, random_pairs(specs))
    write(tmp_path / "b", kimi, specs, random_pairs(specs))
    edit_weights(
        tmp_path / "b",
        lambda t: [t.update({n.replace("language_model.", ""): t.pop(n)}) for n in list(t)] and None,
    )
    for name in "ab":
        merge_adapter(kimi, tmp_path / name, tmp_path / f"out-{name}")
    assert verify_checkpoints(tmp_path / "out-a", tmp_path / "out-b").identical
    assert not verify_checkpoints(tmp_path / "out-a", kimi).identical
