"""Rollouts with images of a real vLLM, offline and over HTTP, become the trainer's inputs, on one GPU.

Runs in the vLLM environment: random weights of a small Qwen3-VL (and of Kimi K2.5, offline), then
transformers computes the log-probabilities that vLLM gave, from what travelled. `KIMI_BRIDGE_RECORD=DIR`
keeps the answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_bridge.checkpoint import synthesize_checkpoint
from kimi_bridge.multimodal import (
    Sample,
    decode,
    encode,
    load_processor,
    materialize,
    pack,
    samples_from_generate,
)
from tests.inference.vllm_cpu import free_port
from tests.multimodal import folders
from tests.multimodal.pictures import data_url, encoded, messages_with, picture

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(1800),
]

ROOT = Path(__file__).parents[2]
TOKENS, ROLLOUTS = 16, 4


def conversations() -> list[list[dict[str, Any]]]:
    sizes = ((300, 200), (120, 500), (448, 448), (90, 64))
    urls = [data_url(encoded(picture(*size, i), "JPEG"), "jpeg") for i, size in enumerate(sizes)]
    return [messages_with(urls[:2]), messages_with([urls[2], urls[0], urls[3]], ["", "", ""])]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL of random weights, loud enough that images matter."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = folders.qwen_folder(tmp_path_factory.mktemp("qwen3_vl"))
    config = folders.qwen_config("qwen3_vl")
    config["vision_config"] |= {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4}
    config["vision_config"] |= {"out_hidden_size": 256}
    config["text_config"] |= {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    config["text_config"]["rope_parameters"] |= {"mrope_section": [12, 10, 10]}
    folders.write(folder / "config.json", config)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(qwen: Path) -> Iterator[str]:
    port = free_port()
    settings = ["--enforce-eager", "--max-model-len", "4096", "--gpu-memory-utilization", "0.3"]
    settings += [
        "--kv-cache-memory-bytes",
        str(1 << 30),
        "--served-model-name",
        "policy",
        "--port",
        str(port),
    ]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(qwen), *settings]
    with (qwen / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
    try:
        deadline = time.monotonic() + 900
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                if process.poll() is not None:
                    pytest.fail((qwen / "server.log").read_text()[-4000:])
                time.sleep(2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def test_offline(qwen: Path) -> None:
    samples = offline(qwen)
    compare(qwen, samples, "offline")


def test_over_http(qwen: Path, server: str) -> None:
    processor = load_processor(qwen)
    samples, answers = [], []
    for number, messages in enumerate(conversations()):
        chat = {"model": "policy", "messages": messages, "n": ROLLOUTS, "max_tokens": TOKENS, "seed": 1}
        chat |= {"logprobs": True, "top_logprobs": 0, "ignore_eos": True}
        # Random weights would sample placeholders too; log-probabilities are those before the bias.
        chat["logit_bias"] = {str(processor.placeholder): -100}
        request = post(f"{server}/v1/chat/completions/render", chat)
        # vLLM 0.26 leaves it out of what it renders, and would sample as far as the context goes.
        request["sampling_params"]["max_tokens"] = TOKENS
        response = post(f"{server}/inference/v1/generate", request)
        samples += samples_from_generate(
            request, response, messages, processor.placeholder, name=f"p{number}"
        )
        request["features"]["kwargs_data"] = None
        answers.append({"messages": messages, "request": request, "response": response})
    keep(qwen, answers, "generate_qwen3_vl.json")
    compare(qwen, samples, "http")


def test_kimi_offline(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Kimi K2.5 has no model in transformers: ids and counts are the engine's, and inputs can be made."""
    folder = synthesize_checkpoint(tmp_path_factory.mktemp("engines") / "kimi_k25", size="small")
    folders.write(folder / "preprocessor_config.json", folders.KIMI_PREPROCESSOR)
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    # vLLM 0.26 takes the published sizes unless they stand under these names.
    vision |= {key.removeprefix("vt_"): value for key, value in vision.items() if key.startswith("vt_")}
    vision["mm_hidden_size"] = vision["hidden_size"]
    folders.write(folder / "config.json", config)
    samples = offline(folder)
    processor = load_processor(folder)
    inputs = materialize(pack(samples), processor)
    assert (inputs["input_ids"] == processor.placeholder).sum() * 4 == len(inputs["pixel_values"])


def offline(folder: Path) -> list[Sample]:
    subprocess.run([sys.executable, "-m", "tests.gpu.vllm_multimodal", str(folder)], check=True, cwd=ROOT)
    record = json.loads((folder / "offline.json").read_text())
    answers = [{"messages": m, "output": o} for m, o in zip(conversations(), record, strict=True)]
    keep(folder, answers, f"offline_{'kimi_k25' if 'kimi' in folder.name else 'qwen3_vl'}.json")
    samples = decode((folder / "offline.msgpack").read_bytes())
    assert len(samples) == ROLLOUTS * len(record)
    return samples


def compare(folder: Path, samples: list[Sample], label: str) -> None:
    """transformers, from the packed batch, against what the engine sampled with; and with wrong pixels."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    batch = pack(decode(encode(samples)))
    inputs = materialize(batch, load_processor(folder))
    inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    mask = torch.from_numpy(batch.loss_mask[1:].copy()).cuda()
    given = torch.from_numpy(batch.logprobs[1:].copy()).cuda()
    apart = {}
    for name, changed in (
        ("as sent", {}),
        ("pixels reversed", {"pixel_values": inputs["pixel_values"].flip(0)}),
    ):
        with torch.no_grad():
            logits = model(**(inputs | changed)).logits[0, :-1].float()
        got = logits.log_softmax(-1).gather(-1, inputs["input_ids"][0, 1:, None])[:, 0]
        apart[name] = (got - given)[mask].abs().mean().item()
    print(f"{label}: {int(mask.sum())} sampled tokens, mean difference of log-probabilities {apart}")
    assert apart["as sent"] < 0.05
    assert apart["as sent"] < 0.3 * apart["pixels reversed"]


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        return json.load(urllib.request.urlopen(request, timeout=600))
    except urllib.error.HTTPError as error:
        pytest.fail(f"{url}: {error.read().decode()[:2000]}")


def keep(folder: Path, answers: list[dict[str, Any]], name: str) -> None:
    """What tests/multimodal/test_engines.py reads from tests/data/multimodal."""
    import vllm

    if target := os.environ.get("KIMI_BRIDGE_RECORD"):
        Path(target).mkdir(parents=True, exist_ok=True)
        record = {"vllm": vllm.__version__, "placeholder": load_processor(folder).placeholder}
        (Path(target) / name).write_text(json.dumps(record | {"answers": answers}) + "\n")
