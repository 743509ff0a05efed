"""vLLM serves adapters on checkpoints of the real structure, on one GPU, by the plugin alone.

Runs in the vLLM environment, without Megatron: the adapters are random, and merged by plain PyTorch. The
package must be installed (editable will do), for vLLM finds the plugin by its entry point. FlashInfer
compiles kernels for about four minutes at the first start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kimi_bridge.checkpoint import FAMILIES, synthesize_checkpoint
from tests.inference.adapters import (
    ATTENTION,
    EXPERTS,
    ROUTER,
    SHARED,
    calm,
    merge,
    random_adapter,
    save_adapter,
)
from tests.inference.vllm_cpu import free_port

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(1800),
]

ROOT = Path(__file__).parents[2]
PROMPTS, LENGTH = 64, 32
# Made by megatron_adapter.py, which says how.
MEGATRON = os.environ.get("KIMI_BRIDGE_MEGATRON_ADAPTER")
MERGED = ("attention", "experts", "all", *(["megatron"] if MEGATRON else []))
PATTERNS = {
    "attention": ATTENTION,
    "experts": EXPERTS,
    "all": f"({ATTENTION}|{EXPERTS}|{SHARED})",
    "other": f"({ATTENTION}|{EXPERTS})",
    "router": ROUTER,
    "kv_b": r"self_attn\.(o_proj|kv_b_proj)",
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, adapters, prompts, and a plan of where they are."""
    folder = tmp_path_factory.mktemp(request.param)
    # Kimi K2.5's in INT4.
    base = calm(synthesize_checkpoint(folder / "base", size="small", family=request.param))
    adapters = {
        name: random_adapter(base, pattern, rank=16, seed=seed, size=0.3)
        for seed, (name, pattern) in enumerate(PATTERNS.items())
    }
    if MEGATRON:
        config = json.loads((Path(MEGATRON) / "adapter_config.json").read_text())
        adapters["megatron"] = config, load_file(Path(MEGATRON) / "adapter_model.safetensors")
    merged = {
        name: merge(
            calm(
                synthesize_checkpoint(
                    folder / "merged" / name, size="small", int4=False, family=request.param
                )
            ),
            adapters[name][1],
        )
        for name in MERGED
    }
    generator = torch.Generator().manual_seed(0)
    plan = {
        "base": str(base),
        "merged": {name: str(path) for name, path in merged.items()},
        "adapters": {
            name: str(save_adapter(folder / "adapters" / name, *adapter))
            for name, adapter in adapters.items()
        },
        "prompts": torch.randint(0, 20000, (PROMPTS, LENGTH), generator=generator).tolist(),
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def run(name: str, folder: Path) -> dict[str, Any]:
    log = folder / f"{name}.log"
    with log.open("w") as out:
        code = subprocess.run(
            [sys.executable, "-m", "tests.gpu.vllm_runs", name, str(folder)],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    assert code == 0, log.read_text()[-6000:]
    return json.loads((folder / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return run("adapters", folder)


def difference(left: Any, right: Any) -> float:
    """Mean |difference| of log-probabilities; of generations, where both sampled the same tokens so far."""
    if isinstance(left, list):
        return (torch.tensor(left) - torch.tensor(right)).abs().mean().item()
    a, b = torch.tensor(left["tokens"]), torch.tensor(right["tokens"])
    same = (a == b).cumprod(dim=1).bool()
    return (torch.tensor(left["logprobs"]) - torch.tensor(right["logprobs"])).abs()[same].mean().item()


def agreement(left: Any, right: Any) -> float:
    return (torch.tensor(left["tokens"]) == torch.tensor(right["tokens"])).float().mean().item()


def same(left: Any, right: Any, found: dict[str, Any], name: str) -> bool:
    """The same but for what two runs of the very same differ in: where two tokens tie, either is sampled."""
    first, second = found[name], found[f"{name} again"]
    tokens, logprobs = agreement(first, second), difference(first, second)
    print(
        f"{name}: same tokens {agreement(left, right):.4f} (a second run {tokens:.4f}),"
        f" log-probabilities {difference(left, right):.6f} apart (a second run {logprobs:.6f})"
    )
    ties = min(0.95, tokens - 0.1)
    return agreement(left, right) >= ties and difference(left, right) <= max(2 * logprobs, 0.0005)


@pytest.mark.parametrize("name", MERGED)
def test_disk_and_memory(name: str, found: dict[str, Any]) -> None:
    assert found[f"memory {name} digest"] == found[f"{name} digest"]
    assert same(found[f"memory {name}"], found[name], found, name)
    assert agreement(found[name], found["base"]) < 0.9


@pytest.mark.parametrize("name", MERGED)
def test_disk_and_memory_to_the_bit(name: str, found: dict[str, Any]) -> None:
    """The same tokens, and log-probabilities without any difference, where a batch does not blur them."""
    assert found[f"memory {name} alone"] == found[f"{name} alone"]
    distinct = {tuple(answer["logprobs"][0]) for answer in found[f"{name} alone"]}
    assert len(distinct) == len(found[f"{name} alone"])


@pytest.mark.parametrize("name", MERGED)
def test_against_the_merged_checkpoint(name: str, found: dict[str, Any], folder: Path) -> None:
    scores = run(f"merged-{name}", folder)["scores"]
    merged = difference(found[name]["logprobs"], scores)
    moved = difference(found[name]["logprobs"], found[f"{name} base scores"])
    print(f"{name}: adapter against merged {merged:.5f}, against the base {moved:.5f}")
    assert merged <= 0.02
    assert moved >= 5 * 0.02


def test_evicted_and_back(found: dict[str, Any]) -> None:
    assert found["evicted"]
    assert same(found["after eviction"], found["attention"], found, "attention")


def test_two_side_by_side(found: dict[str, Any]) -> None:
    alone = [found["all"], found["other"], found["base"]]
    expected = {kind: [alone[i % 3][kind][i] for i in range(PROMPTS)] for kind in ("tokens", "logprobs")}
    assert same(found["side by side"], expected, found, "all")


def test_reloading_does_not_compound(found: dict[str, Any]) -> None:
    assert set(found["reloads"]) == {found["all digest"]}


def test_replaced_under_its_name(found: dict[str, Any]) -> None:
    assert same(found["replaced"], found["other"], found, "other")


def test_what_is_refused(found: dict[str, Any]) -> None:
    kv_b, router, unloaded = found["refused"]
    assert "kv_b_proj" in kv_b
    assert "gate" in router
    assert "memory-all" in unloaded


def test_swapped_over_http(found: dict[str, Any], folder: Path) -> None:
    """`vllm serve MODEL --enable-lora` in processes of its own, an adapter loaded, swapped and unloaded."""
    plan = json.loads((folder / "plan.json").read_text())
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", plan["base"], "--enable-lora"]
    command += ["--max-lora-rank", "16", "--max-model-len", "256", "--enforce-eager", "--language-model-only"]
    # Without a tokenizer: the server would otherwise ask for an image processor, which is not there.
    command += ["--skip-tokenizer-init", "--served-model-name", "base", "--port", str(port)]
    command += ["--gpu-memory-utilization", "0.15"]
    command += ["--kv-cache-memory-bytes", str(2 << 30), "--max-num-batched-tokens", "4096"]
    log = folder / "serve.log"
    environment = os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, log)

        def post(path: str, **body: Any) -> Any:
            return call(f"http://127.0.0.1:{port}/v1/{path}", body)

        def complete(model: str) -> list[float]:
            settings = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
            body = {"prompt": plan["prompts"][0], "return_tokens_as_token_ids": True, **settings}
            [choice] = post("completions", model=model, **body)["choices"]
            return choice["logprobs"]["token_logprobs"]

        # A new name for each version: vLLM's prefix cache knows adapters by name, also where load_inplace
        # replaced one.
        answers = {"base": complete("base")}
        post("load_lora_adapter", lora_name="policy-1", lora_path=plan["adapters"]["all"])
        answers["all"] = complete("policy-1")
        post("load_lora_adapter", lora_name="policy-2", lora_path=plan["adapters"]["other"])
        post("unload_lora_adapter", lora_name="policy-1")
        answers["other"] = complete("policy-2")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            complete("policy-1")
        for name, logprobs in answers.items():
            print(name, logprobs)
            assert abs(logprobs[0] - found[name]["logprobs"][0][0]) < 0.05, name
        assert len({tuple(logprobs) for logprobs in answers.values()}) == 3
    finally:
        server.terminate()
        server.wait(60)


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(900):
        assert server.poll() is None, log.read_text()[-6000:]
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-6000:])


def call(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read().decode()
    return json.loads(text) if text.startswith("{") else text
