"""SkyRL's own worker on a GPU: QAT with LoRA from the INT4 checkpoint, its adapter into vLLM.

    KIMI_BRIDGE_ENGINE_PYTHON=.venv-vllm/bin/python python -m pytest -s tests/gpu/test_skyrl.py

The variable names vLLM's interpreter, KIMI_BRIDGE_ENGINE_PYTHONPATH the PYTHONPATH it needs, as the options
of scripts/gpu_check.py do. Without it the last test skips.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kimi_bridge.checkpoint import synthesize_checkpoint
from kimi_bridge.int4 import KIMI_QAT, RTN
from kimi_bridge.integrations import skyrl
from tests.inference.adapters import calm
from tests.integrations import skyrl_worker

pytest.importorskip("skyrl")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(1200),
]

ROOT = Path(__file__).parents[2]
RESPONSES, STEPS = 32, 4
ENGINE_PYTHON = os.environ.get("KIMI_BRIDGE_ENGINE_PYTHON")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A worker that SkyRL built with the plugin, and a few of its steps."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    folder = tmp_path_factory.mktemp("skyrl")
    source = str(calm(synthesize_checkpoint(folder / "small", size="small")))
    skyrl.install()
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    worker = skyrl_worker.make(skyrl_worker.training(source, rank=16))
    worker.init_model(source, num_training_steps=STEPS)
    vocabulary = worker.provider.vocab_size - 256
    sequences = torch.randint(0, vocabulary, (8, 96), generator=torch.Generator().manual_seed(0))
    data = skyrl_worker.batch(sequences, RESPONSES)
    run = SimpleNamespace(folder=folder, source=source, worker=worker, data=data, sequences=sequences)
    run.before = skyrl_worker.log_probabilities(worker, data)
    run.frozen = {n: p.sum(dtype=torch.float64).item() for n, p in frozen(worker)}
    run.steps = skyrl_worker.train(worker, data, STEPS)
    run.after = skyrl_worker.log_probabilities(worker, data)
    yield run
    skyrl.uninstall()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def frozen(worker: Any) -> list[tuple[str, Any]]:
    return [(n, p) for n, p in worker.actor_module[0].named_parameters() if not p.requires_grad]


def test_a_training_step_of_qat_with_lora(trained: SimpleNamespace) -> None:
    print(f"\nsteps: {trained.steps}")
    bridge = type(trained.worker.bridge._model_bridge)
    assert bridge.__module__ == "kimi_bridge.megatron.bridge"
    assert all(step["grad_norm"] > 0 for step in trained.steps)
    assert trained.before.isfinite().all()
    gain = ((trained.after - trained.before) * trained.data["advantages"].cpu()).mean().item()
    print(f"rewarded tokens are likelier by {gain:.4f}")
    assert gain > 0
    for name, parameter in frozen(trained.worker):
        assert parameter.sum(dtype=torch.float64).item() == trained.frozen[name], name


def test_the_experts_get_what_skyrl_gives_them(trained: SimpleNamespace) -> None:
    """Bit for bit but for the sign of zero, and the same log-probabilities."""
    from megatron.core.extensions.transformer_engine import TEGroupedLinear

    linears = [m for m in trained.worker.actor_module[0].modules() if isinstance(m, TEGroupedLinear)]
    ours = [weight for linear in linears for weight in linear._get_weight_tensors()]
    with_plugin = skyrl_worker.log_probabilities(trained.worker, trained.data)
    skyrl.uninstall()
    theirs = [weight for linear in linears for weight in linear._get_weight_tensors()]
    without = skyrl_worker.log_probabilities(trained.worker, trained.data)
    skyrl.install()
    assert len(ours) == len(theirs) > 8
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal((one + 0.0).view(torch.int16), (other + 0.0).view(torch.int16))
    difference = (with_plugin - without).abs().max().item()
    print(f"\nlog-probabilities with and without the plugin: {difference:.2e} apart at most")
    assert difference < 1e-2


@pytest.mark.parametrize("scheme", [KIMI_QAT, RTN], ids=["qat", "rtn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_finite_bit_pattern(dtype: torch.dtype, scheme: Any) -> None:
    from skyrl.backends.skyrl_train.workers.megatron.fake_int4_qat import fake_int4_quantize_ste

    original = getattr(fake_int4_quantize_ste, "__wrapped__", fake_int4_quantize_ste)
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    patterns = patterns[patterns.isfinite()]
    steps = torch.linspace(-1, 1, 31)
    weight = torch.cat([patterns[:, None].float(), patterns[:, None].float() * steps], 1).to(dtype).cuda()
    convention = (32, scheme.scale_divisor, scheme.q_min)
    ours, theirs = skyrl.fake_int4(original)(weight, *convention), original(weight, *convention)
    assert torch.equal((ours + 0.0).view(torch.int16), (theirs + 0.0).view(torch.int16))
    weight[5, 3] = float("nan")
    assert skyrl.fake_int4(original)(weight, *convention)[5].isnan().any(), "NaN must not vanish"


@pytest.mark.skipif(not ENGINE_PYTHON, reason="KIMI_BRIDGE_ENGINE_PYTHON names vLLM's interpreter")
def test_vllm_loads_what_skyrl_exported(trained: SimpleNamespace) -> None:
    class Engine:
        async def update_named_weights(self, request: Any) -> None:
            self.path = request.lora_path

    engine = Engine()
    adapter = trained.folder / "adapter"
    asyncio.run(trained.worker._save_lora_adapters_and_sync(str(adapter), engine))
    assert engine.path == str(adapter)
    plan = {
        "checkpoint": trained.source,
        "adapter": str(adapter),
        "sequences": trained.sequences.tolist(),
        "responses": RESPONSES,
    }
    (trained.folder / "plan.json").write_text(json.dumps(plan))
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = os.environ.get("KIMI_BRIDGE_ENGINE_PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, str(ROOT)]))
    command = [str(ENGINE_PYTHON), "-m", "tests.gpu.skyrl_engine", str(trained.folder)]
    torch.cuda.empty_cache()
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads((trained.folder / "engine.json").read_text())
    served, base = torch.tensor(found["adapter"]), torch.tensor(found["base"])
    apart = {
        "vLLM with the adapter, from the trainer": (served - trained.after).abs().mean().item(),
        "vLLM without it, from the trainer": (base - trained.after).abs().mean().item(),
        "vLLM without it, from the trainer before": (base - trained.before).abs().mean().item(),
    }
    for name, value in apart.items():
        print(f"{name}: {value:.4f}")
    with_adapter, without, _ = apart.values()
    assert with_adapter < without / 2
