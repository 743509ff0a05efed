"""The LoRA patch on the real vLLM. Each case has a process of its own: a class stays patched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_bridge.checkpoint import synthesize_checkpoint

pytest.importorskip("vllm")

MODEL = "from vllm.model_executor.models.kimi_k25 import KimiK25ForConditionalGeneration as Model\n"
MODELS = (
    MODEL
    + "from vllm.model_executor.models.kimi_vl import KimiVLForConditionalGeneration\n"
    + "MODELS = (Model, KimiVLForConditionalGeneration)\n"
)
CHECK = "from vllm.model_executor.models.interfaces import SupportsLoRA, supports_lora\n"
DECODER = "from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM as Decoder\n"
APPLY = "from kimi_bridge.patches.vllm_kimi_k25_lora import apply\n"
# What vLLM asks of an instance, which needs no layers for it; test_built_model has one with layers.
INSTANCE = """
def instance_of(model):
    instance = model.__new__(model)
    __import__('torch').nn.Module.__init__(instance)
    return instance
instance = instance_of(Model)
"""


def run(script: str, **environment: str) -> list[str]:
    """The lines that a script prints with `say`, in a process without this test's plugins and platform."""
    say = "def say(*values): print('>>', *values)\n"
    done = subprocess.run(
        [sys.executable, "-c", say + script],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line[3:] for line in done.stdout.splitlines() if line.startswith(">> ")]


def test_every_family_is_in_the_table() -> None:
    """The patch imports nothing of this library, so it has the names once more."""
    from kimi_bridge.checkpoint import FAMILIES
    from kimi_bridge.patches.vllm_kimi_k25_lora import _TARGETS

    named = {target.name: f"{target.connector}." for target in _TARGETS}
    assert named == {family.architecture: family.projector for family in FAMILIES.values()}


def test_before_and_after() -> None:
    script = f"""
{MODELS}{CHECK}{DECODER}{APPLY}{INSTANCE}
for model in MODELS:
    say(supports_lora(model), supports_lora(instance_of(model)))
say(apply())
for model in MODELS:
    instance = instance_of(model)
    say(supports_lora(model), supports_lora(instance), isinstance(instance, SupportsLoRA))
    say(model.packed_modules_mapping is Decoder.packed_modules_mapping)
    say(model.embedding_modules is Decoder.embedding_modules)
names = [set(vars(model)) for model in MODELS]
say(apply())
say([set(vars(model)) for model in MODELS] == names, all(supports_lora(instance_of(m)) for m in MODELS))
for model in MODELS:
    mapping = instance_of(model).get_mm_mapping()
    say(mapping.language_model, mapping.connector, mapping.tower_model)
"""
    lines = run(script)
    assert lines[:2] == ["False False"] * 2
    first, second = lines[2], lines[9]
    assert first.startswith("KimiK25ForConditionalGeneration accepts LoRA now (declared: ")
    assert " KimiVLForConditionalGeneration accepts LoRA now (declared: " in first
    assert first.count("lora_manager") == first.count("packed_modules_mapping") == 2
    assert lines[3:9] == ["True True True", "True", "True"] * 2
    assert second == (
        "KimiK25ForConditionalGeneration accepts LoRA since an earlier call."
        " KimiVLForConditionalGeneration accepts LoRA since an earlier call."
    )
    assert lines[10:] == [
        "True True",
        "['language_model'] ['mm_projector'] ['vision_tower']",
        "['language_model'] ['multi_modal_projector'] ['vision_tower']",
    ]


def test_members_of_a_later_version() -> None:
    """Annotation-only, with a value, a method, a property: the Protocol of a vLLM that does not exist yet."""
    script = f"""
{MODEL}{CHECK}{DECODER}{APPLY}
from typing import ClassVar, Protocol, runtime_checkable
import vllm.model_executor.models.interfaces as interfaces

@runtime_checkable
class Later(SupportsLoRA, Protocol):
    only_annotated: int
    with_value: ClassVar[dict] = {{}}
    def count_layers(self): ...
    @property
    def depth(self): ...

interfaces.SupportsLoRA = Later
Decoder.with_value = {{"a": 1}}
Decoder.count_layers = lambda self: self.layers
Decoder.depth = property(lambda self: self.layers + 1)
apply()
{INSTANCE}
say(interfaces.supports_lora(instance), isinstance(instance, Later))
instance.language_model = Decoder.__new__(Decoder)
__import__('torch').nn.Module.__init__(instance.language_model)
object.__setattr__(instance.language_model, "layers", 61)
say(Model.with_value is Decoder.with_value, instance.only_annotated, instance.count_layers(), instance.depth)
"""
    assert run(script) == ["True True", "True None 61 62"]


def test_a_member_added_to_the_protocol_itself() -> None:
    script = f"""
{MODEL}{CHECK}{APPLY}{INSTANCE}
apply()
SupportsLoRA.__annotations__["brand_new"] = int
SupportsLoRA.__protocol_attrs__ = SupportsLoRA.__protocol_attrs__ | {{"brand_new"}}
if hasattr(SupportsLoRA, "__non_callable_proto_members__"):  # of Python 3.12.2
    SupportsLoRA.__non_callable_proto_members__ |= {{"brand_new"}}
say(supports_lora(instance))
say(apply())
say(supports_lora(instance))
"""
    before, what, after = run(script)
    assert before == "False"
    assert "(declared: brand_new)" in what
    assert after == "True"


PLUGIN = f"""
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
say(any(f"vllm.model_executor.models.{{name}}" in sys.modules for name in ("kimi_k25", "kimi_vl")))
{MODELS}{CHECK}{INSTANCE}
for model in MODELS:
    say(supports_lora(model), supports_lora(instance_of(model)))
say(sum(type(finder).__name__ == "_WhenImported" for finder in sys.meta_path))
"""


def test_as_a_plugin() -> None:
    """By the entry point alone, and without importing a model that another start of vLLM does not need."""
    assert run(PLUGIN) == ["False", "True True", "True True", "0"]


def test_switched_off() -> None:
    assert run(PLUGIN, KIMI_BRIDGE_VLLM_LORA="0") == ["False", "False False", "False False", "0"]
    [answer] = run(f"{APPLY}say(apply())", KIMI_BRIDGE_VLLM_LORA="0")
    assert answer == "KIMI_BRIDGE_VLLM_LORA is off: vLLM is left as it is."


def test_by_import() -> None:
    script = (
        f"import kimi_bridge.patches.auto as auto\nsay(auto.APPLIED)\n{MODELS}{CHECK}"
        "say([supports_lora(model) for model in MODELS])"
    )
    applied, supported = run(script)
    assert applied.count("will accept LoRA once vLLM imports it") == 2
    assert supported == "[True, True]"


def test_a_vllm_that_supports_it_is_left_alone() -> None:
    script = f"""
{MODELS}{CHECK}{DECODER}{APPLY}
for model in MODELS:
    model.__bases__ = (*model.__bases__, SupportsLoRA)
    model.packed_modules_mapping = {{}}
before = [set(vars(model)) for model in MODELS]
say(all(supports_lora(model) for model in MODELS))
say(apply())
say([set(vars(model)) for model in MODELS] == before)
"""
    supported, what, unchanged = run(script)
    assert supported == unchanged == "True"
    assert what == (
        "KimiK25ForConditionalGeneration accepts LoRA without this library: nothing done."
        " KimiVLForConditionalGeneration accepts LoRA without this library: nothing done."
    )


def test_a_fault_of_the_patch_does_not_stop_vllm() -> None:
    script = f"""
from kimi_bridge.patches import vllm_kimi_k25_lora as patch
del patch._member
patch.apply()
{MODELS}{CHECK}
say([supports_lora(model) for model in MODELS])
"""
    assert run(script) == ["[False, False]"]


@pytest.mark.parametrize(
    ("family", "fused", "modules", "kinds"),
    [
        ("kimi_k25", ["q_a_proj", "kv_a_proj_with_mqa"], 22, {"fused_qkv_a_proj", "q_b_proj"}),
        ("kimi_vl", None, 22, {"q_proj", "kv_a_proj_with_mqa"}),
    ],
)
def test_built_model(family: str, fused: Any, modules: int, kinds: set[str], tmp_path: Path) -> None:
    """The instance with all its layers passes; building the decoder may add to the shared mapping."""
    checkpoint = synthesize_checkpoint(tmp_path / "bf16", int4=False, family=family)
    script = f"""
from pathlib import Path
from tests.inference import vllm_cpu
config = vllm_cpu.engine_config(Path({str(checkpoint)!r}), language_model_only=False)
model = vllm_cpu.build_model(config)
{CHECK}{DECODER}
from vllm.model_executor.models import supports_lora as gate
say(supports_lora(type(model)), gate(model), isinstance(model, SupportsLoRA))
say(type(model).packed_modules_mapping is Decoder.packed_modules_mapping)
say(model.packed_modules_mapping.get("fused_qkv_a_proj"))
worker = vllm_cpu.build_worker(config, model)
manager = worker.model_runner.lora_manager._adapter_manager
say(sum(1 for name, _ in model.named_modules() if not name.startswith("language_model.")) > 20)
say(sorted({{name.split(".")[0] for name in manager.modules}}), len(manager.modules))
say(sorted({{name.rsplit(".", 1)[1] for name in manager.modules}}))
say(model.lora_manager is manager, {{"kv_b_proj", "gate"}} & set(manager.supported_lora_modules))
from kimi_bridge.checkpoint import CheckpointReader
outside = {{name: tuple(p.shape) for name, p in model.named_parameters() if not name.startswith("language_")}}
reader = CheckpointReader(Path({str(checkpoint)!r}))
say(outside == {{n: reader.info(n).shape for n in reader.names() if not n.startswith("language_model.")}})
"""
    supported, shared, found, tower, parts, wrapped, linked, same = run(script)
    # vLLM has other names than Kimi K2.5's checkpoint for the projector, and Kimi-VL's for everything.
    assert same == str(family == "kimi_vl")
    assert supported == "True True True"
    assert shared == "True"
    assert found == str(fused)
    assert tower == "True"
    assert parts == f"['language_model'] {modules}"
    assert {"experts", "o_proj"} | kinds <= set(eval(wrapped))
    assert linked == "True set()"
