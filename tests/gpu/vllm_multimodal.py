"""The offline engine for test_vllm_multimodal.py: `python -m tests.gpu.vllm_multimodal FOLDER`.

Writes FOLDER/offline.msgpack, samples made of the engine's outputs, and FOLDER/offline.json, the outputs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

TOKENS, ROLLOUTS = 16, 4


def main(folder: Path) -> None:
    from vllm import LLM, SamplingParams

    from kimi_bridge.multimodal import encode, load_image, load_processor, samples_from_output
    from tests.gpu.test_vllm_multimodal import conversations

    processor = load_processor(folder)

    def count(url: str) -> int:
        return processor.count_tokens(*load_image(url).size)

    llm = LLM(
        str(folder),
        enforce_eager=True,
        max_model_len=4096,
        limit_mm_per_prompt={"vision_chunk" if "kimi" in folder.name else "image": 4},
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.3,
        seed=0,
    )
    params = SamplingParams(n=ROLLOUTS, max_tokens=TOKENS, logprobs=0, seed=1, ignore_eos=True)
    # Random weights would sample placeholders too; log-probabilities are those before the bias.
    params.logit_bias = {processor.placeholder: -100.0}
    samples, outputs = [], []
    for number, messages in enumerate(conversations()):
        (output,) = llm.chat(messages, params, use_tqdm=False)
        samples += samples_from_output(
            output, messages, processor.placeholder, name=f"p{number}", count=count
        )
        outputs.append(record(output))
    (folder / "offline.msgpack").write_bytes(encode(samples))
    (folder / "offline.json").write_text(json.dumps(outputs))


def record(output: Any) -> dict[str, Any]:
    """What samples are made of, as JSON."""
    completions = [
        {
            "index": completion.index,
            "token_ids": list(completion.token_ids),
            "logprobs": [
                {str(token): value.logprob for token, value in step.items()} for step in completion.logprobs
            ],
        }
        for completion in output.outputs
    ]
    fields = sorted(name for name in vars(output) if "multi_modal" in name or "placeholder" in name)
    return {
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": completions,
        "placeholder_fields": fields,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
