"""What test_vllm_lora.py does with a vLLM engine: `python -m tests.gpu.vllm_runs RUN FOLDER`.

The run reads FOLDER/plan.json and writes FOLDER/RUN.json. It imports no patch: the plugin applies it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

# The engine in this process: what collective_rpc calls can be a function, and one process less starts.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

TOKENS = 16
ALONE = 16
SETTINGS = {
    "language_model_only": True,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 4096,
    # Fixed: vLLM would profile the model for minutes, and count what others hold on this GPU.
    "kv_cache_memory_bytes": 2 << 30,
    "gpu_memory_utilization": 0.15,
    "seed": 0,
}
LORA = {
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 4,
    "max_lora_rank": 16,
    "worker_extension_cls": "kimi_bridge.inference.WorkerExtension",
}


def adapters(folder: Path) -> dict[str, Any]:
    """The engine with LoRA on the base checkpoint."""
    import vllm.lora.ops.triton_ops.utils as lora_kernels
    from safetensors.torch import load_file
    from vllm.lora.request import LoRARequest

    from kimi_bridge.inference import load_adapter, unload_adapter

    # By default they add up in any order, and where two tokens are as likely either is sampled.
    lora_kernels.is_batch_invariant = True
    plan = json.loads((folder / "plan.json").read_text())
    llm = engine(plan["base"], **LORA)
    paths = {name: Path(path) for name, path in plan["adapters"].items()}

    def from_disk(name: str, lora_id: int) -> Any:
        return LoRARequest(name, lora_id, str(paths[name]))

    def from_memory(name: str, adapter: str, lora_id: int) -> Any:
        config = json.loads((paths[adapter] / "adapter_config.json").read_text())
        tensors = load_file(paths[adapter] / "adapter_model.safetensors")
        return load_adapter(llm, name, lora_id, config, tensors)

    found: dict[str, Any] = {"base": generate(llm, plan["prompts"])}
    for number, name in enumerate((*plan["merged"], "other"), 1):
        request = from_disk(name, number)
        found[name] = generate(llm, plan["prompts"], request)
        found[f"{name} digest"] = digest(llm, number)
        # Under another name, so that it does not begin with cached prefixes, which round otherwise.
        again = LoRARequest(f"{name}-again", number + 100, str(paths[name]))
        found[f"{name} again"] = generate(llm, plan["prompts"], again)
        found[f"{name} alone"] = generate_alone(llm, plan["prompts"], request)
        llm.llm_engine.remove_lora(number)
        llm.llm_engine.remove_lora(number + 100)
    in_memory = ("attention", "experts", "all", "other")
    for number, name in [*((10, n) for n in plan["merged"] if n not in in_memory), *enumerate(in_memory, 11)]:
        request = from_memory(f"memory-{name}", name, number)
        found[f"memory {name}"] = generate(llm, plan["prompts"], request)
        found[f"memory {name} digest"] = digest(llm, number)
        found[f"memory {name} alone"] = generate_alone(llm, plan["prompts"], request)
    for name in plan["merged"]:
        found[f"{name} base scores"] = score(llm, sequences(plan, found[name]))
    # Ids 11 to 14 fill the cache of 4; a fifth evicts the first, which comes back without a file.
    from_memory("fifth", "other", 15)
    found["evicted"] = 11 not in llm.llm_engine.list_loras()
    found["after eviction"] = generate(llm, plan["prompts"], LoRARequest("memory-attention", 11, "nowhere"))

    mixed = [from_disk("all", 3), LoRARequest("memory-other", 14, "nowhere"), None]
    requests = [mixed[i % 3] for i in range(len(plan["prompts"]))]
    found["side by side"] = generate(llm, plan["prompts"], requests)

    found["reloads"] = []
    for _ in range(3):
        llm.llm_engine.remove_lora(3)
        llm.llm_engine.add_lora(from_disk("all", 3))
        found["reloads"].append(digest(llm, 3))
        from_memory("memory-all", "all", 13)
        found["reloads"].append(digest(llm, 13))
    # Replaced under its name, with cached prefixes of the last one.
    generate(llm, plan["prompts"], LoRARequest("memory-all", 13, "nowhere"))
    request = from_memory("memory-all", "other", 13)
    found["replaced"] = generate(llm, plan["prompts"], request)
    unload_adapter(llm, 13)
    found["refused"] = refusals(llm, from_disk)
    return found


def refusals(llm: Any, from_disk: Any) -> list[str]:
    """Messages for adapters on kv_b_proj and on the router from disk, and for one that was unloaded."""
    from vllm.lora.request import LoRARequest

    messages = []
    unloaded = LoRARequest("memory-all", 13, "/nowhere")
    for request in (from_disk("kv_b", 20), from_disk("router", 21), unloaded):
        try:
            llm.llm_engine.add_lora(request)
            messages.append("")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def merged(folder: Path, name: str) -> dict[str, Any]:
    """The bf16 checkpoint with an adapter in its weights scores the tokens that the adapter sampled."""
    plan = json.loads((folder / "plan.json").read_text())
    sampled = json.loads((folder / "adapters.json").read_text())
    return {"scores": score(engine(plan["merged"][name]), sequences(plan, sampled[name]))}


def sequences(plan: dict[str, Any], sampled: dict[str, Any]) -> list[list[int]]:
    return [prompt + tokens for prompt, tokens in zip(plan["prompts"], sampled["tokens"], strict=True)]


def engine(model: str, **settings: Any) -> Any:
    from vllm import LLM

    return LLM(model=model, **SETTINGS, **settings)


def generate(llm: Any, prompts: list[list[int]], lora: Any = None) -> dict[str, Any]:
    """Greedy tokens and their log-probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = [done.outputs[0] for done in llm.generate(inputs, params, lora_request=lora, use_tqdm=False)]
    return {
        "tokens": [list(out.token_ids) for out in outputs],
        "logprobs": [
            [step[token].logprob for token, step in zip(out.token_ids, out.logprobs, strict=True)]
            for out in outputs
        ],
    }


def generate_alone(llm: Any, prompts: list[list[int]], lora: Any) -> list[dict[str, Any]]:
    """A few prompts, one after the other and without cached prefixes, so that nothing rounds otherwise.

    In a batch an expert has several blocks of tokens. Which token comes into which differs between runs,
    and Marlin cuts the sums of each block elsewhere.
    """
    answers = []
    for prompt in prompts[:ALONE]:
        llm.reset_prefix_cache()
        answers.append(generate(llm, [prompt], lora))
    return answers


def score(llm: Any, asked: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of the last TOKENS tokens of each sequence."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    inputs = [{"prompt_token_ids": sequence} for sequence in asked]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return [
        [
            step[token].logprob
            for token, step in list(zip(sequence, out.prompt_logprobs, strict=True))[-TOKENS:]
        ]
        for sequence, out in zip(asked, outputs, strict=True)
    ]


def digest(llm: Any, lora_id: int) -> str:
    """Of everything that the layers hold for one adapter, on the first worker."""

    def read(worker: Any) -> str:
        manager = worker.model_runner.lora_manager._adapter_manager
        slot = manager.lora_index_to_id.index(lora_id)
        total = hashlib.sha256()
        for name, module in sorted(manager.modules.items()):
            kinds = ("lora_a_stacked", "lora_b_stacked")
            if hasattr(module, "w13_lora_a_stacked"):
                kinds = tuple(f"{w}_lora_{matrix}_stacked" for w in ("w13", "w2") for matrix in "ab")
            for stack in (stack for kind in kinds for stack in getattr(module, kind)):
                total.update(f"{name} {stack[slot].float().cpu().numpy().tobytes().hex()}".encode())
        return total.hexdigest()

    return llm.collective_rpc(read)[0]


if __name__ == "__main__":
    run, place = sys.argv[1], Path(sys.argv[2])
    answer = adapters(place) if run == "adapters" else merged(place, run.removeprefix("merged-"))
    (place / f"{run}.json").write_text(json.dumps(answer))
