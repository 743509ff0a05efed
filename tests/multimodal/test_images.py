"""What a hostile rollout could send, and what a trainer takes when it is told to."""

from __future__ import annotations

import contextlib
import http.server
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal import ImagePolicy, images, load_image
from tests.multimodal.pictures import data_url, encoded, picture, picture_url


def test_inline_is_all_that_is_allowed_by_itself(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(picture(8, 8)))
    for url in (f"file://{tmp_path}/a.png", "http://127.0.0.1/a.png", "https://127.0.0.1/a.png"):
        with pytest.raises(MultimodalError, match="policy"):
            load_image(url)
    for url in ("file://[", "http://["):
        with pytest.raises(MultimodalError, match="Invalid IPv6"):
            load_image(url)
    for url in ("ftp://host/a.png", "/etc/passwd", "", "javascript:alert(1)", "image/png;base64,AAAA"):
        with pytest.raises(MultimodalError, match="URL"):
            load_image(url)


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png,AAAA",
        "data:image/png;base64",
        "data:;charset=x;base64,AAAA",
        "data:image/png;base64,A-_A",
        "data:image/png;base64,AAA",
        "data:image/png;base64,AA\nAA",
        "data:image/png;base64,ÄÄÄÄ",
    ],
)
def test_other_inline_forms(url: str) -> None:
    with pytest.raises(MultimodalError, match=r"inline images are|no base64"):
        load_image(url)


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header says so and whose data is a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(60000, 60000), (10000, 10000), (2**31 - 1, 2**31 - 1), (0, 5)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bombs_are_refused_by_their_header(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("decoded"))
    with pytest.raises(MultimodalError):
        load_image(data_url(bomb(*size)))


def test_limits() -> None:
    url = picture_url(100, 50)
    assert load_image(url, ImagePolicy(max_pixels=5000)).size == (100, 50)
    with pytest.raises(MultimodalError, match="100 x 50 pixels, the policy allows 4999"):
        load_image(url, ImagePolicy(max_pixels=4999))
    size = len(encoded(picture(100, 50)))
    assert load_image(url, ImagePolicy(max_bytes=size))
    with pytest.raises(MultimodalError, match="bytes"):
        load_image(url, ImagePolicy(max_bytes=size - 1))


def test_formats_of_rarer_decoders_are_refused() -> None:
    for kind in ("TIFF", "PPM", "ICO", "TGA", "EPS", "PDF", "JPEG2000"):
        with pytest.raises(MultimodalError, match="no image of these formats"):
            load_image(data_url(encoded(picture(16, 16), kind)))


def test_folders(tmp_path: Path) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "allowed-not"
    for folder in (allowed, other):
        folder.mkdir()
        (folder / "an image.png").write_bytes(encoded(picture(8, 8)))
    (allowed / "link.png").symlink_to(other / "an image.png")
    policy = ImagePolicy(folders=(allowed,), max_bytes=10000)
    assert load_image(f"file://{allowed}/an%20image.png", policy).size == (8, 8)
    assert load_image(f"FILE://localhost{allowed}/an image.png", policy).size == (8, 8)
    for path in (f"{other}/an image.png", f"{allowed}/../allowed-not/an image.png", f"{allowed}/link.png"):
        with pytest.raises(MultimodalError, match="policy's folders"):
            load_image(f"file://{path}", policy)
    for url in (f"file://{allowed}", f"file://{allowed}/none.png", f"file://host{allowed}/an image.png"):
        with pytest.raises(MultimodalError, match=r"no such file|another host"):
            load_image(url, policy)
    with pytest.raises(MultimodalError, match="null"):
        load_image(f"file://{allowed}/%00", policy)
    (allowed / "large.png").write_bytes(b"\0" * 10001)
    with pytest.raises(MultimodalError, match="over 10000 bytes"):
        load_image(f"file://{allowed}/large.png", policy)


class Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        moved = self.path == "/moved"
        self.send_response(302 if moved else 200)
        if moved:
            self.send_header("Location", "/image.png")
        if self.path == "/short":
            self.send_header("Content-Length", "1000")
        self.end_headers()
        if self.path == "/short":
            self.wfile.write(encoded(picture(8, 8)))
        if self.path == "/drip":
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"\0")
                    time.sleep(0.05)
        if self.path == "/image.png?size=8":
            self.wfile.write(encoded(picture(8, 8)))
        if self.path == "/large":
            self.wfile.write(b"\0" * 200000)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def host() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_hosts(host: str) -> None:
    policy = ImagePolicy(hosts=frozenset({"127.0.0.1"}), max_bytes=100000)
    assert load_image(f"http://{host}/image.png?size=8", policy).size == (8, 8)
    refused = {
        "/moved": "status 302",
        "/large": "over 100000",
        "/none": "no image of",
        "/short": "more expected",
    }
    for path, message in refused.items():
        with pytest.raises(MultimodalError, match=message):
            load_image(f"http://{host}{path}", policy)
    for url in (
        f"http://127.0.0.1@localhost:{host[10:]}/image.png",
        "http://127.0.0.1.evil/",
        "http:///image.png",
    ):
        with pytest.raises(MultimodalError, match="not among the policy's hosts"):
            load_image(url, policy)
    for url in ("http://127.0.0.1:1/x", "http://127.0.0.1:x/", "http://[", f"http://{host}/a b\r\nX: y"):
        with pytest.raises(MultimodalError):
            load_image(url, policy)


def test_a_host_that_never_ends(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "FETCH_SECONDS", 1.0)
    with pytest.raises(MultimodalError, match="not fetched within 1 s"):
        load_image(f"http://{host}/drip", ImagePolicy(hosts=frozenset({"127.0.0.1"})))


def test_transparent_pixels_lie_on_white() -> None:
    image = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert np.array_equal(np.asarray(load_image(data_url(encoded(image)))), np.full((4, 4, 3), 255))
