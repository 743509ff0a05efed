"""target_modules, rank_pattern and alpha_pattern: short, and read back by peft's own functions."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from kimi_bridge.adapter import ModuleSpec, plan_adapter
from kimi_bridge.adapter.patterns import rank_patterns, target_modules
from kimi_bridge.adapter.peft_format import config_dict, linear_modules
from kimi_bridge.checkpoint import CheckpointReader
from tests.adapter.adapters import LAYERS, others

PREFIX = "language_model."
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def linears(kimi: Path) -> list[str]:
    return sorted(linear_modules(CheckpointReader(kimi)))


def test_linear_modules(linears: list[str]) -> None:
    assert len(linears) == 3 * 5 + 3 + 2 * (3 + 8 * 3 + 1) + 1
    assert PREFIX + "lm_head" in linears
    assert LAYERS + "1.mlp.gate" in linears


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (lambda m: ".self_attn." in m, list(ATTENTION)),
        (lambda m: m.endswith(MLP), list(MLP)),
        (lambda m: ".shared_experts." in m, [f"shared_experts.{name}" for name in MLP]),
        (lambda m: ".0.mlp." in m, [f"mlp.{name}" for name in MLP]),
        (lambda m: ".layers.1.self_attn." in m, [f"layers.1.self_attn.{name}" for name in ATTENTION]),
        (lambda m: m.endswith("lm_head"), ["lm_head"]),
        (lambda m: m.endswith("mlp.gate"), ["gate"]),
        (lambda m: m.endswith(("o_proj", "mlp.down_proj")), ["o_proj", "mlp.down_proj"]),
        (lambda m: not m.endswith(("lm_head", "mlp.gate")), [*ATTENTION, *MLP]),
        (
            lambda m: ".mlp.experts." in m,
            [f"experts.{number}.{name}" for number in range(8) for name in MLP],
        ),
        (lambda m: ".experts.5.up_proj" in m, ["experts.5.up_proj"]),
        (lambda m: ".1.mlp.experts.5.up_proj" in m, ["layers.1.mlp.experts.5.up_proj"]),
    ],
)
def test_targets_are_short_and_unambiguous(kimi: Path, linears: list[str], chosen, expected) -> None:  # type: ignore[no-untyped-def]
    modules = [module for module in linears if chosen(module)]
    assert sorted(target_modules(modules, others(kimi, modules))) == sorted(expected)


def test_no_target_is_part_of_another_word() -> None:
    """PEFT asks for a dot before an ending, and `gate` is not the end of a name in `aggregate`."""
    assert target_modules(["m.gate"], ["m.aggregate"]) == ["gate"]
    assert target_modules(["a.b.proj"], ["c.b.proj", "proj"]) == ["a.b.proj"]
    assert target_modules(["proj"], ["c.proj"]) == ["proj"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"self_attn": 8, "experts": 4}, dict.fromkeys(MLP, 4)),
        ({"shared_experts": 8, "experts": 4}, {f"experts\\.\\d+\\.{n}": 4 for n in MLP}),
        ({"self_attn": 8, "experts": 8}, {}),
        ({"self_attn": 4, "shared_experts": 8}, dict.fromkeys(ATTENTION, 4)),
    ],
)
def test_patterns_are_short(linears: list[str], values: dict[str, int], expected: dict[str, int]) -> None:
    ranks = {m: rank for m in linears for part, rank in values.items() if f".{part}." in m}
    assert rank_patterns(ranks, 8) == expected


def test_an_expert_of_its_own_rank(linears: list[str]) -> None:
    ranks = {m: 8 for m in linears if ".mlp.experts." in m}
    ranks[LAYERS + "2.mlp.experts.3.up_proj"] = 2
    assert rank_patterns(ranks, 8) == {r"layers\.2\.mlp\.experts\.3\.up_proj": 2}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_peft_reads_what_was_meant(kimi: Path, linears: list[str], data: st.DataObject) -> None:
    """Any modules with any ranks and alphas, under names with and without the prefix, through JSON."""
    base = CheckpointReader(kimi)
    modules = data.draw(st.lists(st.sampled_from(linears), min_size=1, unique=True))
    # By kinds too, as training chooses them.
    for part in data.draw(st.lists(st.sampled_from((".self_attn.", ".mlp.experts.", ".shared_experts.")))):
        modules += [m for m in linears if part in m and m not in modules]
    specs: dict[str, ModuleSpec] = {}
    for module in modules:
        rank, alpha = data.draw(st.sampled_from((1, 4, 16))), data.draw(st.sampled_from((8.0, 4.0, 0.5)))
        rows, columns = base.shape(module + ".weight")
        specs[module] = ModuleSpec(rank, alpha, torch.bfloat16, (rows, columns))
    target = data.draw(st.sampled_from(("peft", "vllm")))
    plan = plan_adapter(specs, base, target)  # type: ignore[arg-type]
    config = LoraConfig(**json.loads(json.dumps(config_dict(plan.config))))
    for module in linears:
        for name in (module, module.removeprefix(PREFIX)):
            assert bool(check_target_module_exists(config, name)) == (module in specs), name
            if module not in specs:
                continue
            rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, name), config.r)
            alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, name), config.lora_alpha)
            assert rank == specs[module].rank
            assert alpha == (specs[module].alpha if target == "peft" else rank)
