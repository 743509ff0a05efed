"""One image from its URL, as the engine sees it, and nothing that a hostile rollout could do instead.

vLLM 0.26 (multimodal/media) takes the first frame, turns it by its EXIF orientation, puts transparent pixels
on white and converts every other mode with Pillow; the same is done here, and compared in the tests. Formats
that it would hand to rarer decoders are refused.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import io
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from PIL import Image, ImageOps

from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal.refs import abbreviated

# Pillow finds phones' multi-picture files under JPEG.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
FETCH_SECONDS = 20.0


@dataclass(frozen=True)
class ImagePolicy:
    """Which images a trainer takes. As it stands: inline ones alone.

    `max_bytes` encoded, `max_pixels` by the header, before anything is decoded; `max_images` a sample.
    `hosts`: names that http(s) URLs may have (redirects are not followed). `folders`: where file URLs may
    point, after links are resolved. What is fetched later may differ from what the engine saw.
    """

    max_bytes: int = 32 * 2**20
    max_pixels: int = 64 * 2**20
    max_images: int = 256
    hosts: frozenset[str] = frozenset()
    folders: tuple[Path, ...] = field(default=())


INLINE_ONLY = ImagePolicy()


def load_image(url: str, policy: ImagePolicy = INLINE_ONLY) -> Image.Image:
    """The image in RGB. Raises MultimodalError for what the policy forbids and what cannot be decoded."""
    data = read_bytes(url, policy)
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # Pillow's decoders raise nearly anything on broken data.
        raise MultimodalError(
            f"{abbreviated(url)}: no image of these formats: {', '.join(FORMATS)} ({error!r})."
        ) from error
    width, height = image.size
    if width * height > policy.max_pixels:
        raise MultimodalError(
            f"{abbreviated(url)}: {width} x {height} pixels, the policy allows {policy.max_pixels}."
        )
    try:
        # Orientation that cannot be read is no orientation, for the engine too.
        with contextlib.suppress(Exception):
            image = ImageOps.exif_transpose(image)
        image.load()
        return _rgb(image)
    except Exception as error:
        raise MultimodalError(f"{abbreviated(url)}: the image is broken ({error!r}).") from error


def read_bytes(url: str, policy: ImagePolicy = INLINE_ONLY) -> bytes:
    """The encoded image. Raises MultimodalError for a URL that the policy forbids or that cannot be read."""
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        data = _inline(url, policy)
    elif scheme in ("http", "https"):
        data = _fetched(url, policy)
    elif scheme == "file":
        data = _from_disk(url, policy)
    else:
        raise MultimodalError(f"{abbreviated(url)}: no data:, http:, https: or file: URL.")
    if len(data) > policy.max_bytes:
        raise MultimodalError(f"{abbreviated(url)}: over {policy.max_bytes} bytes, which the policy allows.")
    return data


def _inline(url: str, policy: ImagePolicy) -> bytes:
    head, comma, text = url[5:].partition(",")
    if not comma or head.partition(";")[2] != "base64":
        raise MultimodalError(f"{abbreviated(url)}: inline images are data:<type>;base64,<data>.")
    # Refused before it is decoded; what base64 adds is a third, and padding.
    if len(text) > policy.max_bytes * 4 // 3 + 4:
        raise MultimodalError(f"{abbreviated(url)}: over {policy.max_bytes} bytes, which the policy allows.")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MultimodalError(f"{abbreviated(url)}: no base64 ({error}).") from error


def _fetched(url: str, policy: ImagePolicy) -> bytes:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise MultimodalError(f"{abbreviated(url)}: {error}.") from error
    if host is None or host not in policy.hosts:
        raise MultimodalError(f"{abbreviated(url)}: host {host} is not among the policy's hosts.")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(host, port, timeout=FETCH_SECONDS)
    late = threading.Event()
    try:
        connection.connect()
        with _deadline(connection.sock, late):
            connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
            answer = connection.getresponse()
            if answer.status != 200:
                raise MultimodalError(
                    f"{abbreviated(url)}: HTTP status {answer.status} (no redirect is followed)."
                )
            data = answer.read(policy.max_bytes + 1)
        if answer.length and len(data) <= policy.max_bytes:
            raise http.client.IncompleteRead(data, answer.length)
        return data
    except (OSError, http.client.HTTPException, ValueError) as error:
        if late.is_set():
            raise MultimodalError(f"{abbreviated(url)}: not fetched within {FETCH_SECONDS:.0f} s.") from error
        if isinstance(error, MultimodalError):
            raise
        raise MultimodalError(f"{abbreviated(url)}: not fetched ({error}).") from error
    finally:
        connection.close()


@contextlib.contextmanager
def _deadline(connected: socket.socket, late: threading.Event) -> Iterator[None]:
    """Ends the connection after FETCH_SECONDS: the socket's own timeout begins anew with every byte."""

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(FETCH_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError


def _from_disk(url: str, policy: ImagePolicy) -> bytes:
    try:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise MultimodalError(f"{abbreviated(url)}: a file on another host.")
        path = Path(unquote(parts.path)).resolve()
        if not any(path.is_relative_to(folder.resolve()) for folder in policy.folders):
            raise MultimodalError(f"{abbreviated(url)}: not in one of the policy's folders.")
        if not path.is_file():
            raise MultimodalError(f"{abbreviated(url)}: no such file.")
        with path.open("rb") as file:
            return file.read(policy.max_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, MultimodalError):
            raise
        raise MultimodalError(f"{abbreviated(url)}: not read ({error}).") from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        if image.mode != "RGBA":
            image = image.convert("RGBA")
        canvas = Image.new("RGB", image.size, (255, 255, 255))
        canvas.paste(image, mask=image.getchannel("A"))
        return canvas
    return image.convert("RGB")
