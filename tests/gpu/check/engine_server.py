"""vLLM in a process of its own: JSON commands on stdin, a JSON reply a line on stdout.

Started by file, so that it needs vLLM, safetensors and an installed kimi_bridge, not the tests:

    python -P engine_server.py '{"model": "PATH", "lora": true, ...}'

Tensors come as safetensors files. Everything that vLLM prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

# Before vLLM is imported. The engine in this process: what collective_rpc calls can be a function.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# The second model runner cannot tell which experts a token took.
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Server:
    """Holds the engine; a method for each command."""

    def __init__(self, settings: dict[str, Any], reply: Any):
        from vllm import LLM

        self.reply = reply
        self.routing: bool = settings["routing"]
        lora = {
            "enable_lora": True,
            "max_loras": 2,
            "max_cpu_loras": 4,
            "max_lora_rank": settings["rank"],
            "worker_extension_cls": "kimi_bridge.inference.WorkerExtension",
        }
        self.llm = LLM(
            model=settings["model"],
            language_model_only=True,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=512,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
            max_logprobs=settings["top"],
            gpu_memory_utilization=settings["memory"],
            # Fixed: measuring what is free would count the trainer's memory, which comes and goes.
            kv_cache_memory_bytes=2 << 30,
            seed=0,
            **({"enable_return_routed_experts": True} if self.routing else {}),
            **(lora if settings["lora"] else {}),
        )
        self.requests: dict[str, Any] = {}

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int,
        temperature: float,
        top: int,
        seed: int,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """Tokens and log-probabilities [n, t], the `top` most likely [n, t, top], the experts taken."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=tokens,
                ignore_eos=True,
                logprobs=top,
                detokenize=False,
                seed=seed * 1000 + place if temperature else None,
            )
            for place in range(len(prompts))
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        request = self.requests[adapter] if adapter is not None else None
        outputs = self.llm.generate(inputs, params, lora_request=request, use_tqdm=False)
        done = [output.outputs[0] for output in outputs]
        best = [
            [
                sorted(((entry.logprob, token) for token, entry in step.items()), reverse=True)[:top]
                for step in out.logprobs
            ]
            for out in done
        ]
        experts = [getattr(out, "routed_experts", None) for out in done]
        return {
            "tokens": [list(out.token_ids) for out in done],
            "logprobs": [
                [step[token].logprob for token, step in zip(out.token_ids, out.logprobs, strict=True)]
                for out in done
            ],
            "top_ids": [[[token for _, token in step] for step in out] for out in best],
            "top_logprobs": [[[value for value, _ in step] for step in out] for out in best],
            "experts": None if any(e is None for e in experts) else [e.tolist() for e in experts],
        }

    def adapter_from_memory(self, name: str, number: int, config: dict[str, Any], file: str) -> None:
        """Replaces nothing: every version has a name of its own, for the prefix cache goes by names."""
        from safetensors.torch import load_file

        from kimi_bridge.inference import load_adapter

        self.requests[name] = load_adapter(self.llm, name, number, config, load_file(file))

    def adapter_from_disk(self, name: str, number: int, path: str) -> None:
        from vllm.lora.request import LoRARequest

        self.requests[name] = LoRARequest(name, number, path)

    def drop_adapter(self, name: str) -> None:
        request = self.requests.pop(name)
        if request.lora_path.startswith("memory:"):
            from kimi_bridge.inference import unload_adapter

            unload_adapter(self.llm, request.lora_int_id)
        else:
            self.llm.llm_engine.remove_lora(request.lora_int_id)

    def reload(self, files: list[str]) -> None:
        """New weights, under the checkpoint's names, into the running engine: vLLM's layerwise reload."""

        def tensors() -> Iterator[tuple[str, Any]]:
            from safetensors import safe_open

            for place, file in enumerate(files):
                with safe_open(file, "pt") as source:
                    names = list(source.keys())
                    for number, name in enumerate(names):
                        yield name, source.get_tensor(name)
                        if number == len(names) // 2:
                            self.reply({"event": "reading", "file": place})

        def run(worker: Any) -> None:
            import torch
            from vllm.config import set_current_vllm_config

            with set_current_vllm_config(worker.vllm_config), torch.no_grad():
                worker.model_runner.reload_weights(weights_iterator=tensors())

        self.llm.collective_rpc(run)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset after new weights")
        gc.collect()

    def names(self) -> list[str]:
        """Of the parameters that the engine holds, for a message where a reload does not fit."""
        return self.llm.collective_rpc(
            lambda worker: [name for name, _ in worker.model_runner.get_model().named_parameters()]
        )[0]


def serve(settings: dict[str, Any], descriptor: int) -> None:
    """Replies `{"ready": ...}` once, then `{"result": ...}` or `{"error": ...}` to each command."""
    out = os.fdopen(descriptor, "w")

    def reply(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    begin = time.perf_counter()
    try:
        # The plugin does it too, where it is installed.
        import vllm

        import kimi_bridge.patches.auto  # noqa: F401

        server = Server(settings, reply)
    except Exception as error:
        traceback.print_exc()
        if settings["routing"]:
            _start_again(settings | {"routing": False, "without_routing": str(error)[:500]}, descriptor)
        reply({"error": f"{type(error).__name__}: {error}"})
        return
    ready = {
        "vllm": vllm.__version__,
        "seconds": time.perf_counter() - begin,
        "routing": server.routing,
        "without_routing": settings.get("without_routing"),
    }
    reply({"ready": ready})
    for line in sys.stdin:
        command = json.loads(line)
        if (name := command.pop("command")) == "stop":
            reply({"result": None})
            break
        try:
            reply({"result": getattr(server, name)(**command)})
        except Exception as error:
            traceback.print_exc()
            reply({"error": f"{type(error).__name__}: {error}"})
    # Without the engine's own farewells, which can take as long as its start.
    os._exit(0)


def _start_again(settings: dict[str, Any], descriptor: int) -> None:
    """This process anew, so that no GPU memory is left of the first attempt."""
    sys.stderr.flush()
    command = [sys.executable, "-P", __file__, json.dumps(settings), str(descriptor)]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    # An engine must not outlive its trainer: PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if len(sys.argv) > 2:
        replies = int(sys.argv[2])
    else:
        replies = os.dup(1)
        os.dup2(2, 1)
        os.set_inheritable(replies, True)
    serve(json.loads(sys.argv[1]), replies)
