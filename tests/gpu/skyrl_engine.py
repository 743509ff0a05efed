"""What test_skyrl.py does with vLLM, in vLLM's environment: `python -m tests.gpu.skyrl_engine FOLDER`.

It loads the adapter that SkyRL wrote, and scores the trainer's sequences with it and without.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main(folder: Path) -> None:
    # What install() does in an engine process; the package's plugin does it where it is installed.
    from kimi_bridge.integrations import skyrl

    print(skyrl.install())
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    plan = json.loads((folder / "plan.json").read_text())
    llm = LLM(
        plan["checkpoint"],
        enable_lora=True,
        max_lora_rank=16,
        language_model_only=True,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.15,
    )
    settings = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": sequence} for sequence in plan["sequences"]]
    found = {}
    for name, request in (("adapter", LoRARequest("policy", 1, plan["adapter"])), ("base", None)):
        outputs = llm.generate(prompts, settings, lora_request=request, use_tqdm=False)
        found[name] = [
            [
                position[token].logprob
                for position, token in zip(output.prompt_logprobs, sequence, strict=True)
                if position is not None
            ][-plan["responses"] :]
            for output, sequence in zip(outputs, plan["sequences"], strict=True)
        ]
    (folder / "engine.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
