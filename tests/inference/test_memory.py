"""Adapters from memory, with vLLM's own model and LoRA manager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.inference import WorkerExtension, load_adapter, pack_adapter, unload_adapter
from tests.inference.adapters import (
    ATTENTION,
    EXPERTS,
    ROUTER,
    SHARED,
    language_modules,
    random_adapter,
    save_adapter,
)
from tests.inference.vllm_cpu import buffers

EVERYTHING = f"({ATTENTION}|{EXPERTS}|{SHARED})"


def request(name: str, lora_id: int, path: str = "nowhere", **settings: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, lora_id, path, **settings)


def use(worker: Any, name: str, lora_id: int, path: str = "nowhere") -> None:
    """What vLLM's runner does before it runs a batch with requests of this adapter."""
    worker.model_runner.lora_manager.set_active_adapters({request(name, lora_id, path)}, None)


def equal(left: dict[str, list[torch.Tensor]], right: dict[str, list[torch.Tensor]]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(a, b) for name in left for a, b in zip(left[name], right[name], strict=True)
    )


@pytest.mark.parametrize("pattern", [ATTENTION, EXPERTS, EVERYTHING], ids=["attention", "experts", "all"])
@pytest.mark.parametrize("packed", [False, True], ids=["tensors", "bytes"])
def test_same_as_from_disk(pattern: str, packed: bool, worker: Any, checkpoint: Path, tmp_path: Path) -> None:
    config, tensors = random_adapter(checkpoint, pattern)
    use(worker, "disk", 1, str(save_adapter(tmp_path / "adapter", config, tensors)))
    expected = buffers(worker)
    worker.model_runner.lora_manager.remove_adapter(1)
    worker.add_adapter_from_tensors(
        "memory", 2, config, pack_adapter(tensors, 1 << 14) if packed else tensors.items()
    )
    use(worker, "memory", 2)
    found = buffers(worker)
    assert equal(found, expected)
    assert sum(bool(matrix.any()) for stack in found.values() for matrix in stack) > 10


def test_values_are_where_they_belong(worker: Any, checkpoint: Path) -> None:
    config, tensors = random_adapter(checkpoint, EVERYTHING)
    worker.add_adapter_from_tensors("policy", 1, config, tensors)
    found = buffers(worker)
    layer = "language_model.model.layers.1"
    if f"{layer}.self_attn.fused_qkv_a_proj" in found:
        q_a, kv_a, q_b, kv_b = found[f"{layer}.self_attn.fused_qkv_a_proj"]
        first = "self_attn.q_a_proj"
    else:  # Kimi-VL compresses no queries
        first = "self_attn.q_proj"
        (q_a, q_b), (kv_a, kv_b) = (
            found[f"{layer}.{module}"] for module in (first, "self_attn.kv_a_proj_with_mqa")
        )
    gate_a, up_a, gate_b, up_b, down_a, down_b = found[f"{layer}.mlp.experts"]
    for module, a, b in [
        (first, q_a[0], q_b[0]),
        ("self_attn.kv_a_proj_with_mqa", kv_a[0], kv_b[0]),
        ("mlp.experts.3.gate_proj", gate_a[3], gate_b[3]),
        ("mlp.experts.3.up_proj", up_a[3], up_b[3]),
        ("mlp.experts.3.down_proj", down_a[3], down_b[3]),
    ]:
        name = f"base_model.model.{layer}.{module}"
        assert torch.equal(a[:4], tensors[f"{name}.lora_A.weight"]), module
        assert torch.equal(b[:, :4], tensors[f"{name}.lora_B.weight"]), module


def test_a_layer_computes_with_it(worker: Any, checkpoint: Path) -> None:
    """vLLM's CPU kernels of LoRA, on one linear layer."""
    from vllm.lora.layers import LoRAMapping

    config, tensors = random_adapter(checkpoint, ATTENTION, size=1.0)
    worker.add_adapter_from_tensors("policy", 1, config, tensors)
    manager = worker.model_runner.lora_manager
    name = "language_model.model.layers.1.self_attn.o_proj"
    layer = manager._adapter_manager.modules[name]
    with torch.no_grad():
        layer.base_layer.weight.normal_(std=0.1)
    x = torch.randn(6, layer.base_layer.input_size, dtype=torch.bfloat16)
    mapping = LoRAMapping((1,) * 6, (1,), is_prefill=True)
    manager.set_active_adapters({request("policy", 1)}, mapping)
    a, b = (tensors[f"base_model.model.{name}.lora_{matrix}.weight"].float() for matrix in "AB")
    plain = x.float() @ layer.base_layer.weight.float().T
    expected = plain + x.float() @ a.T @ b.T
    assert torch.allclose(layer(x)[0].float(), expected, atol=0.05, rtol=0.02)
    assert (expected - plain).abs().mean() > 0.1


def test_last_of_a_name_is_replaced(worker: Any, checkpoint: Path) -> None:
    config, first = random_adapter(checkpoint, EVERYTHING, seed=1)
    _, second = random_adapter(checkpoint, ATTENTION, seed=2)
    worker.add_adapter_from_tensors("policy", 1, config, first)
    one = buffers(worker)
    worker.add_adapter_from_tensors("policy", 1, config, second)
    assert not any(m.any() for m in buffers(worker)["language_model.model.layers.1.mlp.experts"])
    worker.add_adapter_from_tensors("policy", 7, config, first)
    assert worker.list_adapters_in_memory() == {"policy": 7}
    assert worker.model_runner.list_loras() == {7}
    assert equal(buffers(worker), one)


def test_it_survives_eviction(worker: Any, checkpoint: Path) -> None:
    """One slot in the layers and two in vLLM's cache; the path of a request leads nowhere."""
    adapters = {}
    for lora_id in (1, 2, 3):
        config, tensors = random_adapter(checkpoint, EVERYTHING, seed=lora_id)
        worker.add_adapter_from_tensors(f"policy{lora_id}", lora_id, config, tensors)
        adapters[lora_id] = buffers(worker)
    assert worker.model_runner.list_loras() == {2, 3}
    for lora_id in (1, 2, 3, 1, 3, 2):
        use(worker, f"policy{lora_id}", lora_id)
        assert equal(buffers(worker), adapters[lora_id]), lora_id
    worker.model_runner.lora_manager.remove_all_adapters()
    use(worker, "policy2", 2)
    assert equal(buffers(worker), adapters[2])


def test_reloading_does_not_compound(worker: Any, checkpoint: Path) -> None:
    config, tensors = random_adapter(checkpoint, EVERYTHING)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    loads = []
    for _ in range(3):
        worker.add_adapter_from_tensors("policy", 1, config, tensors)
        loads.append(buffers(worker))
    assert equal(loads[0], loads[1])
    assert equal(loads[0], loads[2])
    assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_the_caller_may_go_on_training(worker: Any, checkpoint: Path) -> None:
    config, tensors = random_adapter(checkpoint, EVERYTHING)
    worker.add_adapter_from_tensors("policy", 1, config, tensors)
    before = buffers(worker)
    for tensor in tensors.values():
        tensor.zero_()
    worker.model_runner.lora_manager.remove_all_adapters()
    use(worker, "policy", 1)
    assert equal(buffers(worker), before)


def test_removal_forgets(worker: Any, checkpoint: Path) -> None:
    from vllm.exceptions import LoRAAdapterNotFoundError

    config, tensors = random_adapter(checkpoint, ATTENTION)
    worker.add_adapter_from_tensors("policy", 1, config, tensors)
    assert worker.remove_adapter_from_memory(1)
    assert worker.list_adapters_in_memory() == {}
    with pytest.raises(LoRAAdapterNotFoundError):
        use(worker, "policy", 1, "/nowhere")
    worker.add_adapter_from_tensors("policy", 1, config, tensors)
    worker.model_runner.remove_lora(1)
    assert worker.list_adapters_in_memory() == {}


def test_a_file_under_its_id_takes_over(worker: Any, checkpoint: Path, tmp_path: Path) -> None:
    config, tensors = random_adapter(checkpoint, ATTENTION)
    folder = save_adapter(tmp_path / "adapter", *random_adapter(checkpoint, EXPERTS))
    worker.add_adapter_from_tensors("policy", 1, config, tensors)
    worker.model_runner.add_lora(request("other", 1, str(folder), load_inplace=True))
    assert worker.list_adapters_in_memory() == {}
    assert buffers(worker)["language_model.model.layers.1.mlp.experts"][0].any()


def refused(worker: Any, config: dict[str, Any], tensors: dict[str, torch.Tensor], message: str) -> None:
    """The adapter is refused, and the last one of its name stays."""
    before = buffers(worker)
    with pytest.raises(KimiBridgeError, match=message):
        worker.add_adapter_from_tensors("policy", 1, config, tensors)
    assert worker.list_adapters_in_memory() == {"policy": 1}
    assert equal(buffers(worker), before)


@pytest.fixture
def policy(worker: Any, checkpoint: Path) -> Any:
    worker.add_adapter_from_tensors("policy", 1, *random_adapter(checkpoint, ATTENTION, seed=9))
    return worker


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_alpha": 8}, r"scale is 8 / 4 \(r and lora_alpha\).*set lora_alpha to r"),
        ({"alpha_pattern": {r"experts\.\d+\.down_proj": 2}}, r"scale is 2 / 4 .*experts\.0\.down_proj"),
        ({"rank_pattern": {"up_proj": 2}}, r"up_proj has rank 4 and the config says 2"),
        ({"use_rslora": True}, "rsLoRA"),
        ({"use_dora": True}, r"'policy'.*DoRA"),
        ({"bias": "all"}, r"'policy'.*[Bb]ias"),
        ({"modules_to_save": ["lm_head"]}, r"'policy'.*modules_to_save"),
        ({"r": None}, "config lacks r:"),
    ],
)
def test_configs_that_are_refused(
    change: dict[str, Any], message: str, policy: Any, checkpoint: Path
) -> None:
    config, tensors = random_adapter(checkpoint, EXPERTS)
    refused(policy, config | change, tensors, message)


def test_smaller_ranks_of_scale_one_are_taken(worker: Any, checkpoint: Path) -> None:
    config, tensors = random_adapter(checkpoint, ATTENTION, rank=8)
    _, experts = random_adapter(checkpoint, EXPERTS, rank=2)
    pattern = {r"experts\.\d+\.\w+_proj": 2}
    worker.add_adapter_from_tensors(
        "policy", 1, config | {"rank_pattern": pattern, "alpha_pattern": pattern}, tensors | experts
    )
    gate = buffers(worker)["language_model.model.layers.1.mlp.experts"][0]
    assert gate[:, :2].any()
    assert not gate[:, 2:].any()


def test_tensors_that_are_refused(policy: Any, checkpoint: Path) -> None:
    config, tensors = random_adapter(checkpoint, EXPERTS)
    first = next(iter(tensors))
    module = first.removesuffix(".lora_A.weight")
    without = {name: tensor for name, tensor in tensors.items() if name != first}
    refused(policy, config, {}, "no tensors")
    refused(policy, config, without, "has no lora_A.weight")
    refused(policy, config, {**tensors, "x.bias": torch.zeros(1)}, "x.bias is no LoRA tensor")
    refused(policy, config, {**tensors, first: torch.zeros(4)}, "a matrix is needed")
    refused(policy, config, {**tensors, first: torch.zeros(2, 128)}, r"lora_A \[2, 128\]")
    refused(policy, config, {**tensors, first: tensors[first] / 0}, "holds NaN or Inf")
    refused(policy, config, {**tensors, first: tensors[first].to(torch.int8)}, "is torch.int8")
    refused(policy, *random_adapter(checkpoint, EXPERTS, rank=16), "vLLM was started for 8")
    missing = {name: tensor for name, tensor in tensors.items() if not name.startswith(module)}
    refused(policy, config, missing, "refuses the adapter 'policy'")


@pytest.mark.parametrize(
    "module",
    [
        "language_model.model.layers.1.mlp.experts.8.gate_proj",
        "language_model.model.layers.1.mlp.experts.0.w1",
        "language_model.model.layers.1.self_attn.k_proj",
        "vision_tower.encoder.blocks.0.wqkv",
    ],
)
def test_modules_that_vllm_does_not_adapt(module: str, policy: Any, checkpoint: Path) -> None:
    config, tensors = random_adapter(checkpoint, ATTENTION)
    rows, columns = language_modules(checkpoint).get(module, (64, 128))
    tensors[f"base_model.model.{module}.lora_A.weight"] = torch.zeros(4, columns, dtype=torch.bfloat16)
    tensors[f"base_model.model.{module}.lora_B.weight"] = torch.zeros(rows, 4, dtype=torch.bfloat16)
    refused(policy, config, tensors, "expected target modules in")


@pytest.mark.parametrize(
    ("pattern", "module"), [(r"self_attn\.(o_proj|kv_b_proj)", "kv_b_proj"), (ROUTER, "gate")]
)
def test_what_vllm_would_ignore(
    pattern: str, module: str, policy: Any, checkpoint: Path, tmp_path: Path
) -> None:
    """vLLM takes such an adapter and applies it nowhere; here the file is refused as well."""
    config, tensors = random_adapter(checkpoint, pattern)
    refused(policy, config, tensors, rf"{module}.*does not apply LoRA on {module}:")
    with pytest.raises(ValueError, match=rf"received .*{module}"):
        policy.model_runner.add_lora(
            request("disk", 2, str(save_adapter(tmp_path / module, config, tensors)))
        )


def test_experts_call_the_router_without_lora(worker: Any) -> None:
    """Why: once vLLM reaches its wrapper, adapters on the router are taken."""
    manager = worker.model_runner.lora_manager._adapter_manager
    block = manager.model.get_submodule("language_model.model.layers.1.mlp")
    bypassed = block.experts.base_layer.gate is block.gate.base_layer
    assert bypassed == ("gate" not in manager.supported_lora_modules)


def test_another_models_shapes_leave_nothing_half_loaded(policy: Any, checkpoint: Path) -> None:
    config, tensors = random_adapter(checkpoint, ATTENTION)
    wider = {name: tensor.repeat(1, 2) if ".lora_A" in name else tensor for name, tensor in tensors.items()}
    with pytest.raises(KimiBridgeError, match="shapes must be those of the model"):
        policy.add_adapter_from_tensors("policy", 1, config, wider)
    assert policy.list_adapters_in_memory() == {}
    assert policy.model_runner.list_loras() == set()


def test_ids_and_parts(policy: Any, checkpoint: Path) -> None:
    config, tensors = random_adapter(checkpoint, ATTENTION)
    with pytest.raises(KimiBridgeError, match="Id 1 belongs to the adapter 'policy'"):
        policy.add_adapter_from_tensors("other", 1, config, tensors)
    with pytest.raises(KimiBridgeError, match="twice"):
        policy.add_adapter_from_tensors("other", 2, config, pack_adapter(tensors) * 2)
    with pytest.raises(KimiBridgeError, match="twice"):
        pack_adapter([*tensors.items(), *tensors.items()])
    with pytest.raises(KimiBridgeError, match="damaged"):
        policy.add_adapter_from_tensors("other", 2, config, [b"no safetensors"])
    worker = WorkerExtension()
    worker.model_runner = object()
    with pytest.raises(KimiBridgeError, match="--enable-lora"):
        worker.list_adapters_in_memory()


def test_vllm_can_extend_its_worker(policy: Any) -> None:
    """vLLM refuses an extension that shares a name with its worker."""
    from vllm.v1.worker.gpu_worker import Worker

    assert not [name for name in dir(WorkerExtension) if not name.startswith("__") and hasattr(Worker, name)]


class Wire:
    """The two calls of vLLM's LLM that loading needs, through vLLM's own serialization without pickle."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.idle, self.resets = worker, True, 0

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        arrived = MsgpackDecoder().decode(MsgpackEncoder().encode((method, args)))
        return [getattr(self.worker, arrived[0])(*arrived[1])]

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return self.idle


def test_engine_side(worker: Any, checkpoint: Path) -> None:
    """Every byte crosses as vLLM's RPC carries it, with a config as PEFT's object has it."""
    config, tensors = random_adapter(checkpoint, EVERYTHING)
    worker.add_adapter_from_tensors("direct", 1, config, tensors)
    expected = buffers(worker)
    llm = Wire(worker)
    targets = set(config["target_modules"])
    asked = load_adapter(llm, "policy", 2, config | {"target_modules": targets}, iter(tensors.items()))
    assert (asked.lora_name, asked.lora_int_id, llm.resets) == ("policy", 2, 1)
    assert equal(buffers(worker), expected)
    with pytest.raises(KimiBridgeError, match="set lora_alpha to r"):
        load_adapter(llm, "policy", 2, config | {"lora_alpha": 16}, tensors)
    llm.idle = False
    with pytest.raises(KimiBridgeError, match="call reset_prefix_cache"):
        load_adapter(llm, "policy", 2, config, tensors)
    unload_adapter(llm, 2)
    assert worker.list_adapters_in_memory() == {"direct": 1}
