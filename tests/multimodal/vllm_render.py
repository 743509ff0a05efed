"""vLLM's own GPU-less render server (`vllm launch render`), in this process: its routes, its processors."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any


class Renderer:
    """POST /v1/chat/completions/render for one checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        import vllm.platforms
        from vllm.platforms.cpu import CpuPlatform

        # The wheel for CUDA finds no platform on a machine without a GPU.
        vllm.platforms._current_platform = CpuPlatform()
        from vllm.config import VllmConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.openai.api_server import build_app, init_render_app_state
        from vllm.entrypoints.openai.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        # vLLM casts patches to the model's type: float32 leaves them as they are.
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(
            ["--model", str(folder), "--served-model-name", "policy", "--dtype", "float32"]
        )
        config = VllmConfig(model_config=AsyncEngineArgs.from_cli_args(args).create_model_config())
        self.app = build_app(args, ("render",))
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(init_render_app_state(config, self.app.state, args))

    def render(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The body for /inference/v1/generate, as JSON."""
        return self.loop.run_until_complete(self._post({"model": "policy", "messages": messages}))

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        import httpx

        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://render", timeout=300) as client:
            answer = await client.post("/v1/chat/completions/render", json=body)
        if answer.status_code != 200:
            raise RuntimeError(answer.text)
        return answer.json()


def tensors(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The tensors that the body carries for each image, by name."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item

    (items,) = body["features"]["kwargs_data"].values()
    return [{name: element.data for name, element in decode_mm_kwargs_item(item).items()} for item in items]


def load_image(data: bytes) -> Any:
    """What vLLM's media connector makes of an inline image; raises what it raises."""
    from vllm.multimodal.media.connector import MediaConnector
    from vllm.multimodal.media.image import ImageMediaIO

    url = "data:image/any;base64," + base64.b64encode(data).decode()
    return MediaConnector().load_from_url(url, ImageMediaIO()).media
