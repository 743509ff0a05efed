"""Tensors, slices and INT4 weights, against what safetensors itself reads from the files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_folders import EXPERT, INDEX, PLAIN, edit_json, same_bits
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from kimi_bridge.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec, resolve_checkpoint
from kimi_bridge.checkpoint.triplets import part_names
from kimi_bridge.errors import CheckpointError
from kimi_bridge.int4 import dequantize


def everything(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors by safetensors' own reader, in the order of files and offsets."""
    tensors = {}
    for shard in sorted(folder.glob("*.safetensors")):
        raw = shard.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        loaded = load_file(shard)
        assert loaded.keys() == header.keys() - {"__metadata__"}
        tensors.update(sorted(loaded.items(), key=lambda item: header[item[0]]["data_offsets"]))
    return tensors


def test_tensors_names_and_places(tiny: Path) -> None:
    reader, expected = CheckpointReader(tiny), everything(tiny)
    assert reader.names() == list(expected)
    index = json.loads((tiny / INDEX).read_text())["weight_map"]
    assert reader.weight_map == index
    assert list(reader.weight_map) == list(expected)
    for name, tensor in expected.items():
        assert name in reader
        assert same_bits(reader.tensor(name), tensor)
        info = reader.info(name)
        assert (info.name, info.filename, info.dtype) == (name, index[name], tensor.dtype)
        assert (info.shape, info.nbytes) == (tuple(tensor.shape), tensor.nbytes)
        raw = (tiny / info.filename).read_bytes()[info.offset : info.offset + info.nbytes]
        assert raw == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert reader.bytes_read == sum(tensor.nbytes for tensor in expected.values())
    assert "no.such.tensor" not in reader


def test_slices_read_only_what_is_asked_for(tiny: Path) -> None:
    reader, expected = CheckpointReader(tiny), everything(tiny)[PLAIN]
    for rows, columns in (
        (slice(3, 9), None),
        (None, slice(16, 48)),
        (slice(8), slice(60, None)),
        (slice(5, 5), slice(None)),
        (slice(0, 128), slice(0, 64)),
    ):
        before = reader.bytes_read
        part = reader.slice(PLAIN, rows, columns)
        assert same_bits(part, expected[rows or slice(None), columns or slice(None)])
        assert part.is_contiguous()
        assert reader.bytes_read - before == part.nbytes
    norm = "language_model.model.norm.weight"
    assert same_bits(reader.slice(norm, slice(1, 4)), reader.tensor(norm)[1:4])


@pytest.mark.parametrize(
    ("name", "rows", "columns", "message"),
    [
        (PLAIN, slice(0, 129), None, "Range 0:129 is not within dimension 0"),
        (PLAIN, slice(-1, None), None, "Range -1:128 is not within"),
        (PLAIN, slice(5, 4), None, "Range 5:4 is not within"),
        (PLAIN, None, slice(0, 65), "Range 0:65 is not within dimension 1"),
        (PLAIN, slice(0, 8, 2), None, "step 2"),
        ("language_model.model.norm.weight", None, slice(0, 1), "dimension 1 of language_model.model.norm"),
        ("language_model.model.nrm.weight", None, None, "language_model.model.nrm.weight is not in"),
    ],
)
def test_slices_out_of_range(
    tiny: Path, name: str, rows: slice | None, columns: slice | None, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tiny).slice(name, rows, columns)


def test_logical_weights(tiny: Path) -> None:
    reader, tensors = CheckpointReader(tiny), everything(tiny)
    triplets = {name.removesuffix("_packed") for name in tensors if name.endswith(".weight_packed")}
    plain = {name for name in tensors if not name.endswith(("_packed", "_scale", "_shape"))}
    assert len(triplets) == 2 * 8 * 3
    assert reader.weights() == {name: name in triplets for name in reader.weight_names()}
    assert set(reader.weight_names()) == triplets | plain
    assert reader.is_triplet(EXPERT)
    assert not reader.is_triplet(PLAIN)
    with pytest.raises(CheckpointError, match=r"nothing\.weight is not in"):
        reader.is_triplet("nothing.weight")
    reader.check()


@pytest.mark.parametrize("convention", ["kimi", "rtn", "mixed"])
def test_int4_weights(checkpoints: Path, convention: str) -> None:
    reader, tensors = CheckpointReader(checkpoints / convention), everything(checkpoints / convention)
    plain = CheckpointReader(checkpoints / f"{convention}_bf16")
    for name in (name for name, is_triplet in reader.weights().items() if is_triplet):
        packed, scale, shape = (tensors[part] for part in part_names(name))
        weight = reader.int4(name)
        assert same_bits(weight.packed, packed)
        assert same_bits(weight.scale, scale)
        assert list(weight.shape) == shape.tolist()
        assert same_bits(reader.weight(name), plain.weight(name))
        assert same_bits(reader.weight(name), dequantize(weight, torch.bfloat16))
        assert same_bits(reader.weight(name, dtype=torch.float32), dequantize(weight, torch.float32))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (slice(0, 64), None),
        (None, slice(32, 64)),
        (slice(100, 101), slice(0, 32)),
        (slice(7, None), slice(None, 32)),
    ],
)
def test_int4_slices(tiny: Path, rows: slice | None, columns: slice | None) -> None:
    reader = CheckpointReader(tiny)
    whole = reader.weight(EXPERT)
    before = reader.bytes_read
    part = reader.int4(EXPERT, rows, columns)
    # Besides codes and scales, the 8 bytes of weight_shape.
    assert reader.bytes_read - before == part.packed.nbytes + part.scale.nbytes + 8
    expected = whole[rows or slice(None), columns or slice(None)]
    assert part.shape == tuple(expected.shape)
    assert same_bits(dequantize(part), expected)
    assert same_bits(reader.weight(EXPERT, rows, columns), expected)


@pytest.mark.parametrize(("rows", "columns"), [(slice(7, 7), None), (None, slice(32, 32))])
def test_int4_slices_are_not_empty(tiny: Path, rows: slice | None, columns: slice | None) -> None:
    with pytest.raises(CheckpointError, match="empty slice"):
        CheckpointReader(tiny).int4(EXPERT, rows, columns)


@pytest.mark.parametrize(
    "columns", [slice(0, 16), slice(8, 40), slice(0, 96), slice(-32, None), slice(32, 0)]
)
def test_int4_columns_are_whole_groups(tiny: Path, columns: slice) -> None:
    with pytest.raises(CheckpointError, match="not whole groups of 32 within 64"):
        CheckpointReader(tiny).int4(EXPERT, columns=columns)


def test_plain_weights(tiny: Path) -> None:
    reader = CheckpointReader(tiny)
    assert same_bits(reader.weight(PLAIN), reader.tensor(PLAIN))
    assert same_bits(reader.weight(PLAIN, slice(0, 2)), reader.tensor(PLAIN)[:2])
    assert same_bits(reader.weight(PLAIN, dtype=torch.float64), reader.tensor(PLAIN).double())
    with pytest.raises(CheckpointError, match="is plain, not INT4"):
        reader.int4(PLAIN)


def test_config_and_quantization(tiny: Path) -> None:
    reader = CheckpointReader(tiny)
    assert reader.config_dict == json.loads((tiny / "config.json").read_text())
    assert reader.config.text_config.hidden_size == 128
    assert reader.config.to_dict() == reader.config_dict
    assert reader.quantization is not None
    assert reader.quantization.group_size == 32


def test_each_shard_is_opened_once_and_closed(tiny: Path) -> None:
    with CheckpointReader(tiny) as reader:
        tensors = [reader.tensor(name) for name in reader.names()]
        held = everything(tiny)
    for name, tensor in zip(reader.names(), tensors, strict=True):
        assert same_bits(tensor, held[name])
    assert same_bits(reader.tensor(PLAIN), held[PLAIN])


def test_one_file_without_an_index(tiny: Path, tmp_path: Path) -> None:
    tensors = everything(tiny)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(tiny / "config.json", tmp_path)
    reader = CheckpointReader(tmp_path)
    reader.check()
    assert set(reader.names()) == set(tensors)
    assert same_bits(reader.weight(EXPERT), CheckpointReader(tiny).weight(EXPERT))


def test_all_shards_without_an_index(spoiled: Path) -> None:
    names = CheckpointReader(spoiled).names()
    (spoiled / INDEX).unlink()
    reader = CheckpointReader(spoiled)
    reader.check()
    assert reader.names() == names


def test_group_size_64(tiny: Path, tmp_path: Path) -> None:
    from kimi_bridge.checkpoint import synthesize_checkpoint

    content = json.loads((tiny / "config.json").read_text())["text_config"]["quantization_config"]
    content["config_groups"]["group_0"]["weights"]["group_size"] = 64
    synthesize_checkpoint(tmp_path / "g64", overrides={"quantization_config": content})
    reader = CheckpointReader(tmp_path / "g64")
    reader.check()
    assert reader.int4(EXPERT).scale.shape == (128, 1)
    up = EXPERT.replace("down", "up")
    assert same_bits(reader.weight(up, columns=slice(64, 128)), reader.weight(up)[:, 64:])
    with pytest.raises(CheckpointError, match="whole groups of 64"):
        reader.int4(up, columns=slice(32, 64))
    # The same files under a config that says groups of 32.
    edit_json(
        tmp_path / "g64/config.json",
        lambda config: config["text_config"]["quantization_config"]["config_groups"]["group_0"][
            "weights"
        ].update(group_size=32),
    )
    with pytest.raises(
        CheckpointError, match=r"weight_scale .* expected bfloat16, float16 or float32 \[64, 4\]"
    ):
        CheckpointReader(tmp_path / "g64").check()


def test_int64_weight_shape_and_float16_scales(tiny: Path, tmp_path: Path) -> None:
    tensors = everything(tiny)
    for name in tensors:
        if name.endswith("weight_shape"):
            tensors[name] = tensors[name].long()
        if name.endswith("weight_scale"):
            tensors[name] = tensors[name].half()
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    with CheckpointWriter(tmp_path / "other", specs) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    shutil.copy(tiny / "config.json", tmp_path / "other")
    reader = CheckpointReader(tmp_path / "other")
    reader.check()
    assert reader.weight(EXPERT).dtype == torch.float16
    assert same_bits(reader.int4(EXPERT).scale, tensors[EXPERT + "_scale"])


def test_resolve_a_local_folder(tiny: Path) -> None:
    assert resolve_checkpoint(str(tiny)) == tiny
    assert resolve_checkpoint(tiny) == tiny


@pytest.mark.parametrize(
    "name", ["no such folder", "./nothing/here", "/no/such/folder", "..", "nothing", "a/b/c"]
)
def test_resolve_nonsense(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "..":
        name = str(tmp_path / "file")
        Path(name).touch()
    with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
        resolve_checkpoint(name)


def test_resolve_from_the_hub_cache(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: a hub id whose snapshot is in the cache is found, with its links; another is not."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "hub/models--some--kimi"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("0" * 40)
    for number, path in enumerate(sorted(tiny.iterdir())):
        shutil.copy(path, repo / "blobs" / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    assert resolve_checkpoint("some/kimi") == snapshot
    CheckpointReader(snapshot).check()
    with pytest.raises(CheckpointError, match="some/other is neither a folder nor a hub id"):
        resolve_checkpoint("some/other")
