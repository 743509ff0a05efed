"""One of two expert-parallel ranks: `python -m tests.inference.rank RANK PORT CHECKPOINT ADAPTER`.

Prints one line of JSON with what it found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from kimi_bridge.inference.memory import AdapterMemory
from tests.inference import vllm_cpu

LAYER = "language_model.model.layers.1.mlp.experts"


class Watched(dict[str, torch.Tensor]):
    """Named tensors that remember which values somebody took."""

    taken: set[str]

    def __getitem__(self, name: str) -> torch.Tensor:
        self.taken.add(name)
        return super().__getitem__(name)


def main(rank: int, port: int, checkpoint: Path, folder: Path) -> Iterator[tuple[str, object]]:
    from vllm.lora.request import LoRARequest

    config = vllm_cpu.engine_config(
        checkpoint, tensor_parallel_size=2, enable_expert_parallel=True, distributed_executor_backend="mp"
    )
    model = vllm_cpu.build_model(config, rank, 2, port)
    worker = vllm_cpu.build_worker(config, model)
    manager = worker.model_runner.lora_manager
    spec = manager._adapter_manager.moe_ep_load_spec
    yield "experts", [spec.ep_rank, spec.local_num_experts, spec.global_num_experts]

    manager.add_adapter(LoRARequest("disk", 1, str(folder)))
    expected = vllm_cpu.buffers(worker)
    manager.remove_adapter(1)
    tensors = load_file(folder / "adapter_model.safetensors")
    watched = Watched(tensors)
    watched.taken = set()
    settings = json.loads((folder / "adapter_config.json").read_text())
    AdapterMemory.of(manager).add("memory", 2, settings, watched)
    found = vllm_cpu.buffers(worker)
    yield (
        "as from disk",
        all(torch.equal(a, b) for name in expected for a, b in zip(expected[name], found[name], strict=True)),
    )

    numbers = {int(name.split(".experts.")[1].split(".")[0]) for name in watched.taken if ".experts." in name}
    yield "values taken of experts", sorted(numbers)
    kept = AdapterMemory.of(manager)._kept[2].adapter
    yield "experts kept", [matrix.shape[0] for matrix in kept.loras[LAYER].lora_a]
    gate = [tensors[f"base_model.model.{LAYER}.{i}.gate_proj.lora_A.weight"] for i in sorted(numbers)]
    yield "in place", torch.equal(found[LAYER][0][:, :4], torch.stack(gate))


if __name__ == "__main__":
    found = dict(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])))
    print(json.dumps(found))
