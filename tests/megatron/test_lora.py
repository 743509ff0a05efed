"""Adapters out of Megatron's shards and back: what they compute, every layout, every refusal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_bridge.adapter import load_adapter
from kimi_bridge.checkpoint import FAMILIES, synthesize_checkpoint
from tests.megatron.conftest import needs_megatron_checkpoints
from tests.megatron.ranks import Layout, Ranks

GROUPED = [
    "per-expert",
    "normalized",
    "shared",
    "shared-normalized",
    "outer",
    "outer-normalized",
    "canonical",
    "canonical-normalized",
    "canonical-shared",
    "attention",
]
LOCAL = ["per-expert", "normalized", "canonical", "canonical-normalized"]
LAYOUTS = [
    Layout(tp=tp, ep=ep, pp=pp) for tp in (1, 2) for ep in (1, 2) for pp in (1, 2) if tp * ep * pp <= 4
]


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # transformers hard-codes an epsilon of 1e-6 in the norms of MLA's latents.
    folder = tmp_path_factory.mktemp("base") / request.param
    return synthesize_checkpoint(folder, overrides={"rms_norm_eps": 1e-6}, family=request.param)


@pytest.fixture(scope="module")
def adapters(ranks: Ranks, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a variant's random adapter, made once, in both forms."""
    root = tmp_path_factory.mktemp("adapters")

    def get(variant: str) -> Path:
        if not (root / variant).exists():
            ranks.run("lora_scenarios.make", src=str(base), dst=str(root / variant), variant=variant)
        return root / variant

    return get


@pytest.mark.parametrize(
    ("variant", "spec"), [(v, "grouped") for v in GROUPED] + [(v, "local") for v in LOCAL]
)
def test_export_computes_what_the_trainer_computes(
    ranks: Ranks, base: Path, tmp_path: Path, variant: str, spec: str
) -> None:
    arguments = {"src": str(base), "dst": str(tmp_path), "variant": variant, "spec": spec}
    layouts = [Layout()]
    if (variant, spec) in [("normalized", "grouped"), ("shared", "grouped"), ("canonical", "local")]:
        # Expert tensor parallelism, where upstream's adapters compute something else.
        layouts += [Layout(tp=2), Layout(tp=2, etp=1)]
    for layout in layouts:
        result = ranks.run("lora_scenarios.parity", **arguments, layout=layout)
        assert result["peft"] < 2e-4
        assert result["vllm"] < 2e-4
        assert result["moved"] > 0.1
        assert (result["moved by experts"] > 0.1) == (variant != "attention")


@pytest.mark.parametrize("spec", ["grouped", "local"])
def test_gradients_under_expert_tensor_parallelism(
    ranks: Ranks, base: Path, adapters: Any, tmp_path: Path, spec: str
) -> None:
    source = load_adapter(adapters("per-expert") / "peft")
    tensors = {}
    for module in source.modules:
        if "self_attn" not in module:
            a, b = source.tensors(module)
            name = f"base_model.model.{module}"
            tensors |= {f"{name}.lora_A.weight": a.float(), f"{name}.lora_B.weight": b.float()}
    shutil.copytree(adapters("per-expert") / "peft", tmp_path / "adapter")
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    found = []
    for layout in (Layout(), Layout(tp=2)):
        ranks.run(
            "lora_scenarios.gradients",
            src=str(base),
            adapter=str(tmp_path / "adapter"),
            dst=str(tmp_path / str(layout)),
            variant="per-expert",
            layout=layout,
            spec=spec,
        )
        found.append(load_file(tmp_path / str(layout) / "adapter_model.safetensors"))
    whole, split = found
    # Of the last layer: through the others Megatron's own backward wants sequence parallelism.
    last = max(name.split(".layers.")[1].split(".")[0] for name in whole)
    experts = [name for name in whole if f".layers.{last}.mlp.experts." in name]
    assert sum(bool(whole[name].any()) for name in experts) > len(experts) / 2
    for name in experts:
        # Without it every token is there once a rank.
        torch.testing.assert_close(split[name], 2 * whole[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tp", [1, 2])
def test_overlapped_shared_experts(ranks: Ranks, base: Path, tp: int) -> None:
    result = ranks.run("lora_scenarios.overlapped_shared_experts", src=str(base), layout=Layout(tp=tp))
    assert max(result.values()) < 1e-5, result


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_the_same_files(
    ranks: Ranks, base: Path, adapters: Any, tmp_path: Path, layout: Layout
) -> None:
    _check_round_trip(ranks, base, adapters, tmp_path, "normalized", layout)


@pytest.mark.parametrize(
    ("layout", "variant"),
    [(Layout(tp=2, ep=2, etp=1), variant) for variant in GROUPED]
    # Megatron-Bridge does not split shared-outer adapters; test_misfits holds the error.
    + [(Layout(tp=2, etp=2, pp=2), variant) for variant in GROUPED if not variant.startswith("outer")],
    ids=str,
)
def test_every_variant_gives_the_same_files(
    ranks: Ranks, base: Path, adapters: Any, tmp_path: Path, variant: str, layout: Layout
) -> None:
    _check_round_trip(ranks, base, adapters, tmp_path, variant, layout)


def _check_round_trip(
    ranks: Ranks, base: Path, adapters: Any, tmp_path: Path, variant: str, layout: Layout
) -> None:
    source = adapters(variant)
    result = ranks.run(
        "lora_scenarios.round_trip",
        src=str(base),
        adapter=str(source),
        dst=str(tmp_path),
        variant=variant,
        layout=layout,
    )
    assert result["stream"]
    assert result["cleared"] == 0
    # Upstream has the shared half of shared-outer adapters as one 3D tensor, which PEFT and vLLM do not
    # read, and mixes up gate and up of experts that tensor parallelism splits: the parity test says who is
    # right.
    if not variant.startswith("outer"):
        split = layout.get("etp", layout.get("tp", 1)) > 1 and variant != "attention"
        assert bool(result["upstream"]) == split
        mixed = (".gate_proj.lora_B.weight", ".up_proj.lora_B.weight")
        assert all(".experts." in name and name.endswith(mixed) for name in result["upstream"])
    for target in ("peft", "vllm"):
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            assert (tmp_path / target / name).read_bytes() == (source / target / name).read_bytes()


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2), Layout(ep=2)], ids=str)
def test_folded_form_comes_back(
    ranks: Ranks, base: Path, adapters: Any, tmp_path: Path, layout: Layout
) -> None:
    source = adapters("normalized")
    ranks.run(
        "lora_scenarios.vllm_form_comes_back",
        src=str(base),
        adapter=str(source),
        dst=str(tmp_path),
        variant="normalized",
        layout=layout,
    )
    wanted = load_file(source / "vllm/adapter_model.safetensors")
    for target in ("peft", "vllm"):
        found = load_file(tmp_path / target / "adapter_model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert {spec.scale for spec in load_adapter(tmp_path / target).modules.values()} == {1.0}


def test_what_vllm_ignores_is_warned_of(ranks: Ranks, base: Path, tmp_path: Path) -> None:
    arguments = {"src": str(base), "variant": "attention", "layout": Layout()}
    found = [
        ranks.run("lora_scenarios.export_warnings", **arguments, dst=str(tmp_path / str(i)), **options)
        for i, options in enumerate([{"target": "vllm"}, {"target": "peft"}, {"target": "vllm", "but": True}])
    ]
    assert "kv_b_proj (3 modules)" in found[0][0]
    assert "linear_kv_up_proj" in found[0][0]
    assert found[1:] == [[], []]


def test_both_forms_have_the_same_delta(adapters: Any) -> None:
    """PEFT's patterns on one side, the folded scale on the other."""
    peft, vllm = (load_adapter(adapters("normalized") / target) for target in ("peft", "vllm"))
    scales = {spec.scale for spec in peft.modules.values()}
    assert scales == {24 / 16, 24 / 8}
    assert vllm.config.lora_alpha == vllm.config.r == 16
    for module, spec in peft.modules.items():
        (a, b), (folded_a, folded_b) = peft.tensors(module), vllm.tensors(module)
        assert torch.equal(a, folded_a)
        assert folded_b.dtype == b.dtype == torch.bfloat16
        exact = spec.scale * b.double()
        assert ((folded_b.double() - exact).abs() <= exact.abs() * 2**-8).all()


def test_trained_elsewhere(ranks: Ranks, base: Path, adapters: Any, tmp_path: Path) -> None:
    """Names of the text model alone, rsLoRA, fewer modules: the rest of the model's adapters do nothing."""
    source = load_adapter(adapters("attention") / "peft")
    tensors, trained = {}, ("o_proj", "q_b_proj", "q_proj")
    for module in source.modules:
        if module.endswith(trained):
            name = "base_model.model." + module.removeprefix("language_model.")
            a, b = source.tensors(module)
            tensors |= {f"{name}.lora_A.weight": a.clone(), f"{name}.lora_B.weight": b.clone()}
    (tmp_path / "foreign").mkdir()
    save_file(tensors, tmp_path / "foreign/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 8, "use_rslora": True}
    config |= {"target_modules": list(trained), "task_type": "CAUSAL_LM"}
    (tmp_path / "foreign/adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "wrap").mkdir()
    (tmp_path / "wrap/peft").symlink_to(tmp_path / "foreign")
    result = ranks.run(
        "lora_scenarios.round_trip",
        src=str(base),
        adapter=str(tmp_path / "wrap"),
        dst=str(tmp_path / "out"),
        variant="per-expert",
        layout=Layout(tp=2, ep=2),
        poison=False,
    )
    found = load_adapter(tmp_path / "out/peft")
    assert result["cleared"] == len(found.modules) - len(tensors) // 2
    for module, spec in found.modules.items():
        a, b = found.tensors(module)
        if module.endswith(trained):
            assert spec.scale == pytest.approx(8 / 4)
            name = "base_model.model." + module.removeprefix("language_model.")
            assert torch.equal(a, tensors[f"{name}.lora_A.weight"])
            assert torch.equal(b, tensors[f"{name}.lora_B.weight"])
        else:
            assert not b.any()


def test_shared_adapters_say_that_they_depend_on_the_ep_size(
    ranks: Ranks, base: Path, tmp_path: Path
) -> None:
    def export(name: str, **options: Any) -> Any:
        return ranks.run(
            "lora_scenarios.export_only",
            src=str(base),
            dst=str(tmp_path / name),
            variant="shared",
            layout=Layout(ep=2),
            **options,
        )

    notes = export("shared")
    assert notes["expert_model_parallel_size"] == 2
    assert load_adapter(tmp_path / "shared").notes["expert_adapters"] == notes["expert_adapters"]
    assert "expert_adapters" not in export("expanded", expand_shared_experts=True)

    def load(name: str, variant: str, ep: int) -> dict[str, Any]:
        return {
            "scenario": "lora_scenarios.load_only",
            "src": str(base),
            "adapter": str(tmp_path / name),
            "variant": variant,
            "layout": Layout(ep=ep),
        }

    errors = ranks.errors(**load("shared", "shared", 1))
    assert "2 EP ranks" in errors[0].message
    assert "share_expert_adapters=False" in errors[0].message


class Damage:
    """Copies of a good adapter with one thing wrong."""

    @staticmethod
    def nan(folder: Path) -> str:
        _edit(folder, lambda t: t[_first(t, "lora_B")].view(-1)[3:4].fill_(float("inf")))
        return "NaN or Inf"

    @staticmethod
    def half(folder: Path) -> str:
        _edit(folder, lambda t: t.pop(_first(t, "lora_B")))
        return "is missing in"

    @staticmethod
    def ranks_disagree(folder: Path) -> str:
        _edit(folder, lambda t: t.update({_first(t, "lora_A"): t[_first(t, "lora_A")][:3].clone()}))
        return "they disagree"

    @staticmethod
    def unknown_module(folder: Path) -> str:
        def rename(t: dict[str, torch.Tensor]) -> None:
            for name in [n for n in t if "layers.0.self_attn.o_proj" in n]:
                t[name.replace("o_proj", "k_proj")] = t.pop(name)

        _edit(folder, rename)
        return "belongs to another base model"

    @staticmethod
    def other_shape(folder: Path) -> str:
        def widen(t: dict[str, torch.Tensor]) -> None:
            name = next(n for n in t if "o_proj.lora_A" in n)
            t[name] = torch.cat([t[name], t[name]], dim=1)

        _edit(folder, widen)
        return "belongs to another base model"

    @staticmethod
    def other_rank(folder: Path) -> str:
        config = json.loads((folder / "adapter_config.json").read_text())
        config |= {"r": 8, "rank_pattern": {}, "alpha_pattern": {}}
        (folder / "adapter_config.json").write_text(json.dumps(config))

        def cut(t: dict[str, torch.Tensor]) -> None:
            for name in t:
                t[name] = (t[name][:8] if "lora_A" in name else t[name][:, :8]).clone()

        _edit(folder, cut)
        return "LoRA(dim=8)"


@pytest.mark.parametrize(
    "fault", ["nan", "half", "ranks_disagree", "unknown_module", "other_shape", "other_rank"]
)
def test_damaged_adapters_are_refused(
    ranks: Ranks, base: Path, adapters: Any, tmp_path: Path, fault: str
) -> None:
    shutil.copytree(adapters("attention") / "peft", tmp_path / "bad")
    expected = getattr(Damage, fault)(tmp_path / "bad")
    errors = ranks.errors(
        "lora_scenarios.load_only",
        src=str(base),
        adapter=str(tmp_path / "bad"),
        variant="attention",
        layout=Layout(tp=2, pp=2),
    )
    assert all(expected in error.message for error in errors), errors
    assert all(error.kind in ("CheckpointError", "KimiBridgeError") for error in errors)


def test_misfits_are_refused(ranks: Ranks, base: Path, adapters: Any, tmp_path: Path) -> None:
    def load(variant: str, into: str, src: Path = base, **options: Any) -> str:
        layout = options.pop("layout", Layout(ep=2))
        arguments = {"src": str(src), "adapter": str(adapters(variant) / "peft"), "variant": into}
        errors = ranks.errors("lora_scenarios.load_only", **arguments, layout=layout, **options)
        return errors[0].message

    assert "add it to LoRA's target_modules" in load("per-expert", "attention")
    assert "share_expert_adapters=False" in load("per-expert", "shared")
    assert "CanonicalLoRA" in load("canonical", "per-expert")
    assert "normalize_moe_lora" in load("normalized", "per-expert")
    outer = load("outer", "outer", layout=Layout(tp=2, etp=2))
    assert "expert_tensor_parallel_size=1" in outer
    other = synthesize_checkpoint(tmp_path / "other", seed=7)
    assert "another base model" in load("attention", "attention", src=other)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("nan", "NaN or Inf"), ("alpha", "same LoRA"), ("none", "no adapters"), ("dora", "DoRA")],
)
def test_bad_models_are_refused(ranks: Ranks, base: Path, tmp_path: Path, fault: str, expected: str) -> None:
    errors = ranks.errors(
        "lora_scenarios.export_only",
        src=str(base),
        dst=str(tmp_path / "out"),
        variant="per-expert",
        layout=Layout(tp=2, ep=2),
        fault=fault,
    )
    assert all(expected in error.message for error in errors), errors
    assert not (tmp_path / "out").exists()


@needs_megatron_checkpoints
@pytest.mark.parametrize("variant", ["normalized", "canonical", "shared"])
def test_adapters_of_a_megatron_checkpoint(
    ranks: Ranks, base: Path, adapters: Any, tmp_path: Path, variant: str
) -> None:
    source = adapters(variant)
    ranks.run(
        "lora_scenarios.through_megatron_checkpoint",
        src=str(base),
        adapter=str(source),
        dst=str(tmp_path / "megatron"),
        variant=variant,
        layout=Layout(tp=2, ep=2, etp=1),
    )
    tp = 2 if variant == "canonical" else 1
    arguments = {"src": str(base), "megatron": str(tmp_path / "megatron")}
    if variant == "canonical":
        errors = ranks.errors(
            "lora_scenarios.export_checkpoint", **arguments, dst=str(tmp_path / "no"), layout=Layout()
        )
        assert "pass --tp 2" in errors[0].message
    for target, layout in (("peft", Layout(tp=tp, pp=2)), ("vllm", Layout(tp=tp, ep=2, etp=1))):
        ranks.run(
            "lora_scenarios.export_checkpoint",
            **arguments,
            dst=str(tmp_path / target),
            layout=layout,
            target=target,
        )
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            assert (tmp_path / target / name).read_bytes() == (source / target / name).read_bytes()


@needs_megatron_checkpoints
def test_megatron_checkpoints_that_hold_no_lora(ranks: Ranks, base: Path, tmp_path: Path) -> None:
    (tmp_path / "iter_1").mkdir()
    (tmp_path / "iter_1/metadata.json").write_text("{}")

    def message() -> str:
        arguments = {"src": str(base), "megatron": str(tmp_path), "dst": str(tmp_path / "out")}
        errors = ranks.errors("lora_scenarios.export_checkpoint", **arguments, layout=Layout())
        return errors[0].message

    assert "no section `peft`" in message()
    (tmp_path / "iter_1/run_config.yaml").write_text("peft: {_target_: megatron.bridge.peft.dora.DoRA}")
    assert "DoRA" in message()
    (tmp_path / "iter_1/run_config.yaml").write_text("peft: {_target_: megatron.bridge.peft.lora.LoRA}")
    assert "cannot be loaded" in message()
    assert not (tmp_path / "out").exists()


def test_existing_folder_is_refused(ranks: Ranks, base: Path, adapters: Any) -> None:
    errors = ranks.errors(
        "lora_scenarios.export_only",
        src=str(base),
        dst=str(adapters("attention") / "peft"),
        variant="attention",
        layout=Layout(tp=2),
    )
    assert all("already holds" in error.message for error in errors)


def test_base_weights_of_a_model_with_adapters(ranks: Ranks, base: Path, tmp_path: Path) -> None:
    message = ranks.run(
        "lora_scenarios.weights_of_a_model_with_adapters",
        src=str(base),
        dst=str(tmp_path / "out"),
        layout=Layout(tp=2, ep=2),
    )
    assert "export_adapter" in message


def test_collectives_do_not_grow_with_experts(ranks: Ranks, tmp_path: Path) -> None:
    counts = []
    for experts in (8, 64):
        src = synthesize_checkpoint(tmp_path / str(experts), overrides={"n_routed_experts": experts})
        arguments = {"src": str(src), "dst": str(tmp_path / f"out{experts}")}
        counts.append(ranks.run("lora_scenarios.collectives", **arguments, layout=Layout(ep=2)))
    assert counts[0] == counts[1] < 16


def _edit(folder: Path, change: Any) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _first(tensors: dict[str, torch.Tensor], part: str) -> str:
    return next(name for name in sorted(tensors) if part in name)
