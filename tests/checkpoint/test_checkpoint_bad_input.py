"""Folders that are not what they claim to be: each fault has its own error that names the cause."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import (
    EXPERT,
    INDEX,
    PLAIN,
    add_tensor,
    edit_json,
    edit_shard,
    remove_tensor,
    replace_tensor,
    shard_of,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from kimi_bridge.checkpoint import CheckpointReader
from kimi_bridge.errors import CheckpointError

FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"


def refuses(folder: Path, message: str) -> None:
    """check() raises, and with tolerate=True the same fault is on the list of problems instead."""
    with pytest.raises(CheckpointError, match=message) as caught:
        CheckpointReader(folder).check()
    assert "\n" not in str(caught.value)
    tolerant = CheckpointReader(folder, tolerate=True)
    tolerant.check()
    assert str(caught.value) in tolerant.problems


@pytest.mark.parametrize(
    "filename",
    [
        "/etc/passwd.safetensors",
        "../model.safetensors",
        "sub/model.safetensors",
        "..",
        ".",
        "",
        ".hidden.safetensors",
        "C:model.safetensors",
        "..\\model.safetensors",
        "model\0.safetensors",
        "model.bin",
        "config.json",
    ],
)
def test_an_index_that_points_elsewhere(spoiled: Path, filename: str) -> None:
    edit_json(spoiled / INDEX, lambda index: index["weight_map"].__setitem__(PLAIN, filename))
    with pytest.raises(CheckpointError, match=r"names the file .* do not use this checkpoint"):
        CheckpointReader(spoiled)


@pytest.mark.parametrize("value", [7, None, ["model.safetensors"], {"a": 1}, True])
def test_an_index_with_values_that_are_no_names(spoiled: Path, value: Any) -> None:
    edit_json(spoiled / INDEX, lambda index: index["weight_map"].__setitem__(PLAIN, value))
    with pytest.raises(CheckpointError, match="as the file of language_model"):
        CheckpointReader(spoiled)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("\xff", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("{}", "has no weight_map"),
        ("[]", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": ["a"]}', "has no weight_map"),
        ('{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}', "'a' stands there twice"),
    ],
)
def test_a_broken_index(spoiled: Path, text: str, message: str) -> None:
    (spoiled / INDEX).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(spoiled)


def test_an_index_that_is_too_large(spoiled: Path) -> None:
    with (spoiled / INDEX).open("ab") as file:
        file.truncate(100_000_001)
    with pytest.raises(CheckpointError, match="larger than 100,000,000 bytes"):
        CheckpointReader(spoiled)


def test_a_missing_shard(spoiled: Path) -> None:
    (spoiled / SECOND).unlink()
    refuses(spoiled, f"{SECOND}, which the index names, is not in")


def test_a_folder_in_place_of_a_shard(spoiled: Path) -> None:
    (spoiled / SECOND).unlink()
    (spoiled / SECOND).mkdir()
    refuses(spoiled, f"{SECOND}, which the index names, is not in")


def test_a_tensor_that_the_file_does_not_hold(spoiled: Path) -> None:
    edit_json(
        spoiled / INDEX, lambda index: index["weight_map"].update({"a.weight": SECOND, "b.weight": SECOND})
    )
    refuses(spoiled, f"{SECOND} does not hold a.weight and 1 more, which the index lists")


def test_a_tensor_that_the_index_does_not_list(spoiled: Path) -> None:
    edit_shard(spoiled / SECOND, lambda tensors: tensors.__setitem__("a.weight", torch.zeros(1)))
    refuses(spoiled, f"{SECOND} holds a.weight, which the index does not list")


def test_a_tensor_in_two_files_without_an_index(spoiled: Path) -> None:
    (spoiled / INDEX).unlink()
    save_file({PLAIN: torch.zeros(2)}, spoiled / "zzz.safetensors")
    refuses(spoiled, rf"{PLAIN} is in {FIRST} and in zzz.safetensors, and there is no {INDEX}")


def test_a_missing_number_without_an_index(spoiled: Path) -> None:
    (spoiled / INDEX).unlink()
    (spoiled / SECOND).unlink()
    refuses(spoiled, f"{SECOND} is missing in .*, which has no {INDEX} either")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickle_files_are_never_read(tiny: Path, tmp_path: Path, name: str) -> None:
    shutil.copy(tiny / "config.json", tmp_path)
    torch.save({"a": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}, a pickle file.* only safetensors are read"):
        CheckpointReader(tmp_path)


def test_no_weights_and_no_folder(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="holds no weights"):
        CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
        CheckpointReader(tmp_path / "config.json")


def test_config_missing_broken_or_of_another_model(spoiled: Path) -> None:
    path = spoiled / "config.json"
    good = path.read_text()
    path.unlink()
    refuses(spoiled, "has no config.json")
    path.write_text("nonsense")
    refuses(spoiled, "config.json is not valid JSON")
    path.write_text("[]")
    refuses(spoiled, "config.json is no JSON object")
    path.write_text(json.dumps(json.loads(good) | {"model_type": "llama"}))
    refuses(spoiled, "model_type 'llama'.*reads 'kimi_k25' and 'kimi_vl' checkpoints only")
    path.write_text(json.dumps(json.loads(good) | {"architectures": ["LlamaForCausalLM"]}))
    refuses(spoiled, "architecture LlamaForCausalLM")


# --- Headers ---------------------------------------------------------------------------------------------


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_header(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def change_entry(**change: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        header, data = header_of(path)
        header[PLAIN].update(change)
        write_header(path, header, data)

    return edit


def drop_first_entry(path: Path) -> None:
    header, data = header_of(path)
    first = min((name for name in header if name != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    del header[first]
    write_header(path, header, data)


def shift_entry(by: int) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        header, data = header_of(path)
        begin, end = header[PLAIN]["data_offsets"]
        header[PLAIN]["data_offsets"] = [begin + by, end + by]
        write_header(path, header, data)

    return edit


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (cut(-1), r"truncated: expected \d[\d,]+ bytes, has \d[\d,]+; download it again"),
        (cut(100), "truncated: expected .* bytes, has 100;"),
        (cut(3), "truncated: expected .* bytes, has 3;"),
        (cut(0), "truncated: expected 8 bytes, has 0;"),
        (lambda path: path.write_bytes(path.read_bytes() + b"xyz"), "has 3 bytes after its last tensor"),
        (
            lambda path: path.write_bytes((10**12).to_bytes(8, "little") + b"{}"),
            "header of 1,000,000,000,000",
        ),
        (lambda path: path.write_bytes(b"version 1\noid sha256:0\n"), "Git LFS pointer"),
        (lambda path: write_header(path, b"{nonsense", b""), "header of .* is not valid JSON"),
        (lambda path: write_header(path, b'{"a": 1, "a": 2}', b""), "'a' stands there twice"),
        (lambda path: write_header(path, b"[" * 100_000, b""), "header of .* is not valid JSON"),
        (lambda path: write_header(path, b"[]", b""), "is no JSON object"),
        (lambda path: write_header(path, b'{"a": 1}', b""), "a in .* lacks dtype, shape or data_offsets"),
        (change_entry(dtype="F4"), f"{PLAIN} in {FIRST} has dtype 'F4'"),
        (change_entry(dtype=["BF16"]), "lacks dtype, shape or data_offsets"),
        (change_entry(dtype="F32"), r"takes 16,384 bytes, but F32 \[128, 64\] needs 32,768"),
        (change_entry(shape=[128, 65]), r"BF16 \[128, 65\] needs 16,640"),
        (change_entry(shape=[-128, -64]), "has the size -128"),
        (change_entry(shape=[128.0, 64]), "has the size 128.0"),
        (change_entry(shape=[True, 8192]), "has the size True"),
        (change_entry(shape=8192), "lacks dtype, shape or data_offsets"),
        (change_entry(data_offsets=[0]), "lacks dtype, shape or data_offsets"),
        (change_entry(data_offsets=[0, "16384"]), "has the size '16384'"),
        (shift_entry(8), "leaves a gap before it|overlaps the tensor before it"),
        (shift_entry(-8), "overlaps the tensor before it|leaves a gap before it"),
        (shift_entry(10**15), "leaves a gap before it"),
        (drop_first_entry, "leaves a gap before it"),
    ],
)
def test_broken_shards(spoiled: Path, edit: Callable[[Path], None], message: str) -> None:
    assert shard_of(spoiled, PLAIN).name == FIRST
    edit(spoiled / FIRST)
    refuses(spoiled, message)


@given(position=st.integers(0, 399), value=st.integers(0, 255))
@example(position=7, value=255)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changed_byte_is_refused_or_harmless(tmp_path: Path, position: int, value: int) -> None:
    """What this reader lets pass, safetensors reads too, and with the same tensors."""
    path = tmp_path / "model.safetensors"
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.arange(4),
        "c": torch.ones(5, dtype=torch.bool),
    }
    save_file(tensors, path)
    raw = bytearray(path.read_bytes())
    raw[position % len(raw)] = value
    path.write_bytes(raw)
    try:
        reader = CheckpointReader(tmp_path)
        ours = {name: reader.tensor(name) for name in reader.names()}
    except CheckpointError:
        return
    theirs = load_file(path)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype
        assert ours[name].shape == theirs[name].shape


def test_a_shard_replaced_after_it_was_checked(spoiled: Path) -> None:
    reader = CheckpointReader(spoiled)
    (spoiled / FIRST).write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match=f"{FIRST} cannot be opened"):
        reader.tensor(PLAIN)
    with pytest.raises(SafetensorError):
        safe_open(spoiled / FIRST, framework="pt")


# --- Triplets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["_packed", "_scale", "_shape"])
def test_an_incomplete_triplet(spoiled: Path, part: str) -> None:
    remove_tensor(spoiled, EXPERT + part)
    refuses(spoiled, rf"{EXPERT}{part} is missing, but {EXPERT}_\w+ is there \(model-")


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        (
            "_packed",
            torch.zeros(128, 8, dtype=torch.int64),
            r"int64 \[128, 8\], expected int32 \[out, in/8\]",
        ),
        ("_packed", torch.zeros(128 * 8, dtype=torch.int32), r"int32 \[1024\], expected int32 \[out, in/8\]"),
        ("_packed", torch.zeros(0, 8, dtype=torch.int32), r"int32 \[0, 8\], expected int32 \[out, in/8\]"),
        ("_packed", torch.zeros(128, 6, dtype=torch.int32), r"in groups of 32"),
        ("_packed", torch.zeros(64, 8, dtype=torch.int32), r"_scale .*expected bfloat16.* \[64, 2\]"),
        ("_packed", torch.zeros(128, 4, dtype=torch.int32), r"_scale .*expected bfloat16.* \[128, 1\]"),
        ("_scale", torch.zeros(128, 2, dtype=torch.float64), r"float64 \[128, 2\], expected bfloat16"),
        (
            "_scale",
            torch.zeros(128, 1, dtype=torch.bfloat16),
            r"bfloat16 \[128, 1\], expected bfloat16.*\[128, 2\]",
        ),
        ("_scale", torch.zeros(256, dtype=torch.bfloat16), r"expected bfloat16.*\[128, 2\]"),
        ("_shape", torch.tensor([128.0, 64.0]), r"float32 \[2\], expected int32 or int64 \[2\]"),
        ("_shape", torch.tensor([128, 64, 1]), r"int64 \[3\], expected int32 or int64 \[2\]"),
    ],
)
def test_triplets_of_wrong_shape_or_dtype(
    spoiled: Path, part: str, tensor: torch.Tensor, message: str
) -> None:
    replace_tensor(spoiled, EXPERT + part, tensor)
    refuses(spoiled, message)


@pytest.mark.parametrize("shape", [[64, 128], [128, 63], [0, 0]])
def test_a_weight_shape_that_disagrees(spoiled: Path, shape: list[int]) -> None:
    replace_tensor(spoiled, EXPERT + "_shape", torch.tensor(shape, dtype=torch.int32))
    reader = CheckpointReader(spoiled)
    reader.check()
    with pytest.raises(CheckpointError, match=rf"{EXPERT}_shape \(model-.*of shape \[128, 64\]"):
        reader.int4(EXPERT, slice(0, 1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scales_that_are_not_finite(spoiled: Path, value: float) -> None:
    scale = CheckpointReader(spoiled).tensor(EXPERT + "_scale").clone()
    scale[100, 1] = value
    replace_tensor(spoiled, EXPERT + "_scale", scale)
    reader = CheckpointReader(spoiled)
    for read in (reader.int4, reader.weight):
        with pytest.raises(CheckpointError, match=rf"{EXPERT}_scale \(model-.* holds NaN or Inf"):
            read(EXPERT)
        read(EXPERT, slice(0, 100))


def test_triplets_without_a_quantization_config(spoiled: Path) -> None:
    edit_json(spoiled / "config.json", lambda c: c["text_config"].__delitem__("quantization_config"))
    refuses(spoiled, r"is an INT4 triplet, but the quantization_config does not say so")


def test_a_triplet_that_the_ignore_list_names(spoiled: Path) -> None:
    edit_json(
        spoiled / "config.json",
        lambda c: c["text_config"]["quantization_config"]["ignore"].append(r"re:.*experts\.3\.down_proj"),
    )
    refuses(spoiled, rf"{EXPERT} \(model-.*\) is an INT4 triplet, but the quantization_config")


def test_a_plain_weight_that_should_be_int4(spoiled: Path) -> None:
    weight = CheckpointReader(spoiled).weight(EXPERT)
    add_tensor(spoiled, EXPERT, weight, beside=EXPERT + "_packed")
    refuses(spoiled, rf"{EXPERT} \(model-.*\) is there both plain and as INT4")
    for part in ("_packed", "_scale", "_shape"):
        remove_tensor(spoiled, EXPERT + part)
    refuses(
        spoiled, rf"{EXPERT} \(model-.*\) is a plain tensor, but the quantization_config says that it is INT4"
    )


def test_an_unsupported_quantization_config(spoiled: Path) -> None:
    edit_json(
        spoiled / "config.json",
        lambda c: c["text_config"]["quantization_config"].__setitem__("format", "nvfp4-pack-quantized"),
    )
    refuses(spoiled, "format 'nvfp4-pack-quantized'")


def test_tolerance_collects_every_fault(spoiled: Path) -> None:
    (spoiled / SECOND).unlink()
    cut(-1)(spoiled / FIRST)
    reader = CheckpointReader(spoiled, tolerate=True)
    reader.check()
    assert len(reader.problems) >= 2
    assert any("is truncated" in problem for problem in reader.problems)
    assert any(SECOND in problem and "is not in" in problem for problem in reader.problems)
    with pytest.raises(CheckpointError, match=f"{FIRST} cannot be opened"):
        reader.tensor(PLAIN)
