"""Shards, index and artifacts as they end up on the disk, and what is left of them when writing fails."""

import json
import random
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_folders import INDEX, contents, same_bits
from safetensors import safe_open
from safetensors.torch import load_file

from kimi_bridge.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec, copy_artifacts
from kimi_bridge.checkpoint.shards import DTYPES
from kimi_bridge.errors import CheckpointError


def some_tensors() -> dict[str, torch.Tensor]:
    """Every dtype, odd sizes, no dimensions, no elements, and a name that JSON must escape."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t.{name}": torch.randint(0, 2, (3, 5), generator=generator).to(dtype)
        for name, dtype in DTYPES.items()
    }
    tensors["nan"] = torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16)
    tensors["scalar"] = torch.tensor(1.5)
    tensors["empty"] = torch.zeros(0, 4)
    tensors['näme "quoted"\n'] = torch.arange(7, dtype=torch.int8)
    tensors["transposed"] = torch.randn(6, 4, generator=generator).t()
    return tensors


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def write(folder: Path, tensors: dict[str, torch.Tensor], order: list[str], size: int | str = "5GB") -> None:
    with CheckpointWriter(folder, specs_of(tensors), size) as writer:
        for name in order:
            writer.write(name, tensors[name])
        writer.finish()


@pytest.mark.parametrize("size", ["5GB", 200, 1])
def test_any_order_gives_the_same_bytes(tmp_path: Path, size: int | str) -> None:
    tensors = some_tensors()
    order = list(tensors)
    write(tmp_path / "first", tensors, order, size)
    expected = contents(tmp_path / "first")
    for seed in range(3):
        random.Random(seed).shuffle(order)
        write(tmp_path / str(seed), tensors, order, size)
        assert contents(tmp_path / str(seed)) == expected
    read = {
        name: t for path in (tmp_path / "first").glob("*.safetensors") for name, t in load_file(path).items()
    }
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(read[name], tensor)
    reader = CheckpointReader(tmp_path / "first")
    assert all(info.offset % info.dtype.itemsize == 0 for info in map(reader.info, reader.names()))
    assert all(same_bits(reader.tensor(name), tensor) for name, tensor in tensors.items())


def test_one_shard_has_no_index(tmp_path: Path) -> None:
    tensors = some_tensors()
    write(tmp_path / "one", tensors, list(tensors))
    assert contents(tmp_path / "one").keys() == {"model.safetensors"}
    with safe_open(tmp_path / "one/model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_are_named_and_indexed_as_hugging_face_does(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((25,), float(i)) for i in range(5)}
    write(tmp_path / "many", tensors, list(tensors), size=200)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert contents(tmp_path / "many").keys() == {*names, INDEX}
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 500}
    assert index["weight_map"] == {f"w{i}": names[i // 2] for i in range(5)}
    for number, name in enumerate(names):
        assert set(load_file(tmp_path / "many" / name)) == {f"w{i}" for i in range(5) if i // 2 == number}


def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    """A model of transformers, saved by this writer in several shards, comes back with the same bits."""
    from transformers import DeepseekV3Config, DeepseekV3Model

    config = DeepseekV3Config(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        q_lora_rank=16,
        kv_lora_rank=16,
        first_k_dense_replace=1,
    )
    tensors = DeepseekV3Model(config).state_dict()
    write(tmp_path / "model", tensors, list(tensors), size="20KB")
    config.save_pretrained(tmp_path / "model")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    loaded = DeepseekV3Model.from_pretrained(tmp_path / "model").state_dict()
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())


def test_nothing_shows_before_finish(tmp_path: Path) -> None:
    tensors = some_tensors()
    with CheckpointWriter(tmp_path / "new", specs_of(tensors), 200) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
            assert all(path.name.startswith(".incomplete-") for path in (tmp_path / "new").iterdir())
    assert not any(path.name.startswith(".") for path in (tmp_path / "new").iterdir())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    tensors = some_tensors()

    def interrupted() -> None:
        with CheckpointWriter(tmp_path / "a/b", specs_of(tensors), 200) as writer:
            writer.write("scalar", tensors["scalar"])
            raise error

    with pytest.raises(error):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tensors = some_tensors()

    def interrupted() -> None:
        with CheckpointWriter(tmp_path, specs_of(tensors)) as writer:
            writer.write("scalar", tensors["scalar"])
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        interrupted()
    assert contents(tmp_path) == {"config.json": b"{}"}


@pytest.mark.parametrize("explicit", [True, False])
def test_missing_tensors_are_named_and_leave_nothing(tmp_path: Path, explicit: bool) -> None:
    tensors = {"a": torch.zeros(1), "b": torch.zeros(1), "c": torch.zeros(1)}

    def incomplete() -> None:
        with CheckpointWriter(tmp_path / "new", specs_of(tensors)) as writer:
            writer.write("b", tensors["b"])
            if explicit:
                writer.finish()

    with pytest.raises(CheckpointError, match=r"2 of 3 tensors were not written to .*: a, c; "):
        incomplete()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("b", torch.zeros(2, 3), "b is not in the plan"),
        (
            "a",
            torch.zeros(2, 3, dtype=torch.float16),
            r"a is torch.float16 \[2, 3\], but the plan of .* says torch.float32",
        ),
        (
            "a",
            torch.zeros(3, 2),
            r"a is torch.float32 \[3, 2\], but the plan of .* says torch.float32 \[2, 3\]",
        ),
        ("a", torch.zeros(6), r"a is torch.float32 \[6\]"),
    ],
)
def test_tensors_that_do_not_fit_the_plan(
    tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    with (
        pytest.raises(CheckpointError, match=message),
        CheckpointWriter(tmp_path / "new", [TensorSpec("a", torch.float32, (2, 3))]) as writer,
    ):
        writer.write(name, tensor)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_written_twice(tmp_path: Path) -> None:
    specs = [TensorSpec("a", torch.float32, (1,)), TensorSpec("b", torch.float32, (1,))]
    with CheckpointWriter(tmp_path / "new", specs) as writer:
        writer.write("a", torch.ones(1))
        with pytest.raises(CheckpointError, match=r"a was written to .* before"):
            writer.write("a", torch.zeros(1))
        writer.write("b", torch.ones(1))
    assert load_file(tmp_path / "new/model.safetensors")["a"].item() == 1


@pytest.mark.parametrize(
    ("specs", "size", "message"),
    [
        ([], "5GB", "without tensors"),
        ([TensorSpec("a", torch.float32, (1,))] * 2, "5GB", "a stands twice"),
        ([TensorSpec("a", torch.complex64, (1,))], "5GB", "a has dtype torch.complex64"),
        ([TensorSpec("a", torch.float32, (1,))], "5 gigs", "max_shard_size is '5 gigs'"),
        ([TensorSpec("a", torch.float32, (1,))], "-5GB", "max_shard_size is '-5GB'"),
        ([TensorSpec("a", torch.float32, (1,))], "nan", "max_shard_size is 'nan'"),
        ([TensorSpec("a", torch.float32, (1,))], -1, "max_shard_size is -1"),
        (
            [TensorSpec("a", torch.float32, (10**9, 10**9))],
            "5GB",
            r"bytes free, but the checkpoint takes 4,000,0",
        ),
    ],
)
def test_plans_that_cannot_be(tmp_path: Path, specs: list[TensorSpec], size: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        CheckpointWriter(tmp_path / "new", specs, size)
    assert list(tmp_path.iterdir()) == []


def test_old_weights_are_only_replaced_on_request(tmp_path: Path) -> None:
    old = {f"w{i}": torch.zeros(10) for i in range(3)}
    new = {"v": torch.ones(1)}
    write(tmp_path, old, list(old), size=40)
    (tmp_path / "config.json").write_text("{}")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"already holds model-00001-of-00003\.safetensors"):
        CheckpointWriter(tmp_path, specs_of(new))

    def interrupted() -> None:
        with CheckpointWriter(tmp_path, specs_of(new), overwrite=True) as writer:
            writer.write("v", new["v"])
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        interrupted()
    assert contents(tmp_path) == before
    with CheckpointWriter(tmp_path, specs_of(new), overwrite=True) as writer:
        writer.write("v", new["v"])
        assert {k: v for k, v in contents(tmp_path).items() if not k.startswith(".")} == before
    assert contents(tmp_path).keys() == {"config.json", "model.safetensors"}
    assert load_file(tmp_path / "model.safetensors")["v"].item() == 1


def test_threads_may_write(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((1000,), float(i)) for i in range(64)}
    write(tmp_path / "expected", tensors, list(tensors), size=16000)
    with CheckpointWriter(tmp_path / "new", specs_of(tensors), 16000) as writer:

        def work(start: int) -> None:
            for i in range(start, 64, 4):
                writer.write(f"w{i}", tensors[f"w{i}"])

        threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert contents(tmp_path / "new") == contents(tmp_path / "expected")


def test_a_limit_on_file_size_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    """A real error of the operating system: for a moment no file may grow beyond 1 MB."""
    specs = [TensorSpec("a", torch.float32, (1_000_000,))]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            CheckpointWriter(tmp_path / "new", specs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    """Writes to /dev/full fail as on a full disk."""
    tensors = {"a": torch.zeros(5), "b": torch.zeros(5)}

    def full() -> None:
        with CheckpointWriter(tmp_path / "new", specs_of(tensors)) as writer:
            (shard,) = (tmp_path / "new").glob(".incomplete-*/*.safetensors")
            shard.unlink()
            shard.symlink_to("/dev/full")
            writer.write("a", tensors["a"])

    with pytest.raises(CheckpointError, match="No space left on device; make room"):
        full()
    assert list(tmp_path.iterdir()) == []


def test_a_destination_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("mine")
    with pytest.raises(CheckpointError, match="new is a file: choose another name"):
        CheckpointWriter(tmp_path / "new", [TensorSpec("a", torch.float32, (1,))])
    assert contents(tmp_path) == {"new": b"mine"}


# --- Artifacts -------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A published folder: files, a folder of figures, weights of many formats, hidden files."""
    source = tmp_path / "source"
    for name in (
        "config.json",
        "tokenizer.json",
        "tiktoken.model",
        "modeling_kimi_k25.py",
        "LICENSE",
        "figures/banner.png",
        "model-00001-of-00001.safetensors",
        INDEX,
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "extra/weights.gguf",
        ".gitattributes",
        ".cache/huggingface/x.json",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(f"{name}\r\n\0".encode())
    return source


KEPT = {
    "config.json",
    "tokenizer.json",
    "tiktoken.model",
    "modeling_kimi_k25.py",
    "LICENSE",
    "figures/banner.png",
}


def test_artifacts_come_over_unchanged(source: Path, tmp_path: Path) -> None:
    copied = copy_artifacts(source, tmp_path / "new")
    assert contents(tmp_path / "new") == {name: f"{name}\r\n\0".encode() for name in KEPT}
    assert {str(path) for path in copied} == KEPT


def test_artifacts_that_are_links_to_blobs(source: Path, tmp_path: Path) -> None:
    shutil.move(source / "config.json", tmp_path / "blob")
    (source / "config.json").symlink_to(tmp_path / "blob")
    (source / "outside").symlink_to(tmp_path)
    copy_artifacts(source, tmp_path / "new")
    assert contents(tmp_path / "new").keys() == KEPT
    assert not (tmp_path / "new/config.json").is_symlink()
    (tmp_path / "blob").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is a link to nothing"):
        copy_artifacts(source, tmp_path / "newer")


def test_artifacts_into_a_folder_of_the_source(source: Path) -> None:
    copy_artifacts(source, source / "new")
    copy_artifacts(source, source / "new")
    assert contents(source / "new").keys() == KEPT
    with pytest.raises(CheckpointError, match="source and destination at once"):
        copy_artifacts(source, source / "new/..")


def test_artifacts_replace_files_and_keep_others(source: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.json").write_text("old")
    (new / "mine.txt").write_text("mine")
    copy_artifacts(source, new)
    assert contents(new).keys() == KEPT | {"mine.txt"}
    assert (new / "config.json").read_bytes() == b"config.json\r\n\0"


def test_artifacts_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "new").write_text("a file")
    with pytest.raises(CheckpointError, match=r"File exists|Not a directory"):
        copy_artifacts(source, tmp_path / "new")
    with pytest.raises(CheckpointError, match="No such file"):
        copy_artifacts(tmp_path / "nowhere", tmp_path / "newer")


def test_another_writer_that_finished_in_the_same_folder_keeps_its_result(tmp_path: Path) -> None:
    specs = [TensorSpec("a", torch.float32, (4,))]
    first, second = CheckpointWriter(tmp_path / "out", specs), CheckpointWriter(tmp_path / "out", specs)
    second.write("a", torch.ones(4))
    second.finish()
    first.write("a", torch.zeros(4))
    with pytest.raises(CheckpointError, match="already holds"):
        first.finish()
    first.abort()
    assert CheckpointReader(tmp_path / "out").tensor("a").tolist() == [1, 1, 1, 1]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    script = f"""
import os, torch
from kimi_bridge.checkpoint import CheckpointWriter, TensorSpec
CheckpointWriter({str(tmp_path / "out")!r}, [TensorSpec("a", torch.float32, (4,))])
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert len(list((tmp_path / "out").glob(".incomplete-*"))) == 1
    with CheckpointWriter(tmp_path / "out", [TensorSpec("a", torch.float32, (4,))]) as writer:
        # One that is at work is left alone.
        other = CheckpointWriter(tmp_path / "out", [TensorSpec("b", torch.float32, (4,))], overwrite=True)
        assert len(list((tmp_path / "out").glob(".incomplete-*"))) == 2
        other.abort()
        writer.write("a", torch.ones(4))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
