"""Records what vLLM says of prompts with images: tests/data/multimodal/*.json, which test_engines.py reads.

    .venv-vllm/bin/python -m tests.multimodal.record_vllm

`render_*.json`: bodies of vLLM's own render endpoint (0.26.0, on a CPU), without the tensors. What an engine
on a GPU answers, tests/gpu/test_vllm_multimodal.py records.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.multimodal import folders
from tests.multimodal.pictures import data_url, encoded, messages_with, picture
from tests.multimodal.vllm_render import Renderer

DATA = Path(__file__).parents[1] / "data" / "multimodal"


def messages() -> list[dict[str, Any]]:
    """A conversation of two turns with three images, two of them side by side, one shown twice."""
    sizes = (90, 60), (130, 200)
    first, second = (data_url(encoded(picture(*size, 1), "JPEG"), "jpeg") for size in sizes)
    return [
        *messages_with([first, second], ["", ""]),
        {"role": "assistant", "content": "Waves."},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": first}}]},
    ]


def main() -> None:
    import vllm

    DATA.mkdir(exist_ok=True)
    for name, make in (("qwen3_vl", folders.qwen_folder), ("kimi_k25", folders.kimi_folder)):
        with tempfile.TemporaryDirectory() as folder:
            body = Renderer(make(Path(folder))).render(messages())
        body["features"]["kwargs_data"] = None
        record = {"vllm": vllm.__version__, "messages": messages(), "request": body}
        (DATA / f"render_{name}.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
