"""What travels: no pixels, each image once, and nothing accepted that was not sent."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_bridge.errors import MultimodalError
from kimi_bridge.multimodal import MMRef, Sample, decode, encode
from tests.multimodal.pictures import encoded, picture, picture_url


def rollout(name: str, *urls: str) -> Sample:
    ids = np.full(4 * len(urls) + 2, 7)
    refs = tuple(MMRef(url, 4 * i + 1, 3) for i, url in enumerate(urls))
    return Sample(name, ids, np.zeros(len(ids)), np.linspace(-1, 0, len(ids)), refs)


def test_a_group_sends_its_images_once() -> None:
    data = encoded(picture(300, 200, 1)), encoded(picture(200, 300, 2))
    urls = picture_url(300, 200, 1), picture_url(200, 300, 2)
    group = [rollout(f"r{i}", *(str(url) for url in urls)) for i in range(8)]
    one, eight = len(encode(group[:1])), len(encode(group))
    assert one <= sum(map(len, data)) + 300
    assert eight - one <= 7 * 200
    arrived = decode(encode(group))
    assert [ref.image for sample in arrived for ref in sample.refs] == list(urls) * 8
    assert len({id(ref.image) for sample in arrived for ref in sample.refs}) == 2


@pytest.mark.parametrize(
    "url",
    [
        "https://host/a,b.png",
        "data:image/png;base64,AAAA",
        "data:image/png;base64,",
        "data:image/png;base64,AAB=",  # bits that base64 leaves open
        "data:image/png;base64,AA AA",
        "DATA:image/png;base64,AAAA",
        "data:image/png,AAAA",
        "data:image/png;base64,ÄÄÄÄ",
        "",
    ],
)
def test_every_url_arrives_as_it_was(url: str) -> None:
    assert decode(encode([rollout("r", url)]))[0].refs[0].image == url


@settings(deadline=None)
@given(st.text())
def test_any_text_arrives_as_it_was(text: str) -> None:
    url = text.encode(errors="replace").decode()
    assert decode(encode([rollout("r", f"data:;base64,{url}")]))[0].refs[0].image == f"data:;base64,{url}"


@pytest.mark.parametrize("url", ["data:;base64,\ud800", "\udfff"])
def test_halves_of_characters_are_refused(url: str) -> None:
    with pytest.raises(MultimodalError, match=r"'second': .*no text"):
        encode([rollout("first", "data:,"), rollout("second", url)])
    message = encode([rollout("r", "data:,xxx")]).replace(b"xxx", b"\xed\xa0\x80")
    with pytest.raises(MultimodalError, match="damaged"):
        decode(message)


def test_versions() -> None:
    body = msgspec.msgpack.decode(encode([rollout("r", "data:,")]))
    assert body[0] == 1
    with pytest.raises(MultimodalError, match="version 2, this side reads 1"):
        decode(msgspec.msgpack.encode([2, *body[1:], "something new"]))


def test_damaged_messages() -> None:
    _, images, [sample] = msgspec.msgpack.decode(encode([rollout("r", "data:,")]))
    name, ids, mask, logprobs, refs = sample
    for damaged in (
        [name, ids[:-1], mask, logprobs, refs],
        [name, ids[:-4], mask, logprobs, refs],
        [name, ids, mask, logprobs, [[1, 1, 3]]],
        [name, ids, mask, logprobs, [[-1, 1, 3]]],
        [name, ids, mask, logprobs, [[0, 1, 30]]],
        [name, ids, mask, logprobs, [[0, 1, 0]]],
        [name, ids, mask, logprobs, [[0, 2**40, 1]]],
        [name, ids, mask, logprobs, refs * 2],
        [name, ids, mask, logprobs, refs, "more"],
        [name, b"\xff" * len(ids), mask, logprobs, refs],
        [name, ids, b"\0" + b"\xff" * (len(mask) - 1), logprobs, refs],
        [name, ids, mask, b"\xff" * len(logprobs), refs],
        ["x" * 10000, ids, mask, logprobs, [[5, 1, 3]]],
        [name, ids, mask, logprobs],
        name,
    ):
        with pytest.raises(MultimodalError) as caught:
            decode(msgspec.msgpack.encode([1, images, [damaged]]))
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("message", [None, "text", 5])
def test_no_bytes(message: object) -> None:
    with pytest.raises(MultimodalError, match="give the bytes of `encode`"):
        decode(message)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message", [b"\xdd\xff\xff\xff\xff", b"\x93\x01\x90\xdd\xff\xff\xff\xff", b"\x91" * 10**5]
)
def test_lengths_and_depths_that_are_not_there(message: bytes) -> None:
    with pytest.raises(MultimodalError, match="damaged"):
        decode(message)


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_noise_is_an_error_and_nothing_else(noise: bytes, place: int) -> None:
    message = encode([rollout("r", "data:image/png;base64,AAAA")])
    for wrong in (noise, message[:place] + noise, message[:place] + noise + message[place + len(noise) :]):
        with contextlib.suppress(MultimodalError):
            decode(wrong)
