"""Model families: what an image becomes, how many tokens it is, and what the model's forward expects.

A processor turns one image at a time into patches; `materialize` does the rest for every family alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from PIL import Image

from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal.refs import MMRef

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class ForwardPolicy:
    """What a trainer must know of a family before it calls forward.

    position_ids: `mrope` is int64 [4, 1, tokens], the text's own positions (which tell packed samples apart)
    over those in time, height and width (the last three are what Megatron takes); `plain` is [1, tokens].
    mm_token_type_ids: whether forward takes them. packs: whether several samples may lie in one batch.
    deferred: what has to be built for the whole sequence, features of images merged in, and is only then cut
    along it, under context or sequence parallelism; an image's block may lie across a cut.
    """

    position_ids: Literal["mrope", "plain"]
    mm_token_type_ids: bool
    packs: bool
    deferred: tuple[str, ...]


class Processor(Protocol):
    """One family with one checkpoint's settings.

    `placeholder` is the token id of an image's block; a token stands for `patches_per_token` patches of
    float32 `patch_shape`. `names` are forward's names for the patches and for their grids.
    """

    @property
    def policy(self) -> ForwardPolicy: ...

    @property
    def placeholder(self) -> int: ...

    @property
    def patches_per_token(self) -> int: ...

    @property
    def patch_shape(self) -> tuple[int, ...]: ...

    @property
    def names(self) -> tuple[str, str]: ...

    def count_tokens(self, width: int, height: int) -> int:
        """The placeholder tokens of an image of that size."""
        ...

    def patches(self, image: Image.Image) -> tuple[torch.Tensor, Grid]:
        """Float32 [patches, *patch_shape] of an RGB image, and its grid of patches (time, height, width)."""
        ...


FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "kimi_k25")


def load_processor(folder: str | Path) -> Processor:
    """The processor of a checkpoint folder, by config.json's model_type. No remote code is run.

    Raises MultimodalError for another family, and for settings that are missing or that it cannot follow.
    """
    from kimi_bridge.multimodal.kimi_k25 import KimiK25
    from kimi_bridge.multimodal.qwen_vl import QwenVL

    family = read_json(Path(folder) / "config.json").get("model_type")
    if family not in FAMILIES:
        raise MultimodalError(f"{folder} is of type {family}: known are {', '.join(FAMILIES)}.")
    return KimiK25.from_folder(Path(folder)) if family == "kimi_k25" else QwenVL.from_folder(Path(folder))


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise MultimodalError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise MultimodalError(f"{path} is no JSON object.")
    return value


def mrope_positions(tokens: int, refs: list[MMRef], grids: list[Grid], merge: int) -> torch.Tensor:
    """int64 [3, tokens]: positions in time, height and width of one sample, as `get_rope_index` gives them.

    Text counts up in all three. An image of t x h x w merged cells begins where the text stopped, runs
    along its own axes, and the text after it goes on behind the longer of h and w (Qwen2-VL,
    arXiv 2409.12191, section 2.1).
    """
    pieces, position, done = [], 0, 0
    for ref, (time, height, width) in zip(refs, grids, strict=True):
        pieces.append(torch.arange(position, position + ref.offset - done).expand(3, -1))
        position += ref.offset - done
        cells = torch.cartesian_prod(
            torch.arange(time), torch.arange(height // merge), torch.arange(width // merge)
        )
        pieces.append(cells.T + position)
        position += max(height, width) // merge
        done = ref.end
    pieces.append(torch.arange(position, position + tokens - done).expand(3, -1))
    return torch.cat(pieces, dim=1)
