"""Import and export as jobs: what they refuse, and what is on the disk afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kimi_bridge.checkpoint import FAMILIES, CheckpointReader, synthesize_checkpoint, verify_checkpoints
from tests.megatron.conftest import HAVE_MEGATRON_CHECKPOINTS
from tests.megatron.ranks import Layout, Ranks


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Path:
    """A folder with a checkpoint and its Megatron checkpoint."""
    if not HAVE_MEGATRON_CHECKPOINTS:
        pytest.skip("Megatron-Bridge's checkpoints need megatron-core 0.19")
    folder = tmp_path_factory.mktemp(request.param)
    convention = "mixed" if request.param == "kimi_k25" else "kimi"
    synthesize_checkpoint(folder / "source", convention=convention, family=request.param)
    ranks.run("import_job", src=str(folder / "source"), megatron=str(folder / "megatron"), overwrite=False)
    return folder


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("target", [".", "source", "source/config.json"])
def test_import_never_replaces_what_is_no_megatron_checkpoint(target: str, made: Path, ranks: Ranks) -> None:
    before = files(made)
    for error in ranks.errors(
        "import_job", src=str(made / "source"), megatron=str(made / target), overwrite=True
    ):
        assert error.kind == "KimiBridgeError"
        assert "--megatron-path" in error.message
    assert files(made) == before


def test_import_over_an_unknown_folder(made: Path, ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("...")
    for overwrite in (False, True):
        ranks.errors(
            "import_job", src=str(made / "source"), megatron=str(tmp_path / "thesis"), overwrite=overwrite
        )
    assert [path.name for path in tmp_path.rglob("*")] == ["thesis", "chapter1.tex"]


def test_import_replaces_a_megatron_checkpoint(made: Path, ranks: Ranks, tmp_path: Path) -> None:
    shutil.copytree(made / "megatron", tmp_path / "m")
    ranks.run("import_job", src=str(made / "source"), megatron=str(tmp_path / "m"), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    "overrides",
    [
        {"vocab_size": 1536},
        {"num_hidden_layers": 4},
        {"n_routed_experts": 16},
        {"hidden_size": 256},
        {"moe_intermediate_size": 128},
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_export_of_another_model(overrides: dict[str, int], made: Path, ranks: Ranks, tmp_path: Path) -> None:
    family = CheckpointReader(made / "source").config.model_type
    synthesize_checkpoint(tmp_path / "other", overrides=overrides, family=family)
    arguments = {"src": str(tmp_path / "other"), "megatron": str(made / "megatron")}
    for error in ranks.errors("export_job", dst=str(tmp_path / "out"), overwrite=False, **arguments):
        assert error.kind == "KimiBridgeError"
        assert "is of another model" in error.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["missing", "truncated", "no metadata"])
def test_export_of_a_damaged_checkpoint(damage: str, made: Path, ranks: Ranks, tmp_path: Path) -> None:
    shutil.copytree(made / "megatron", tmp_path / "m")
    (tmp_path / "m" / "iter_abc").mkdir()
    part = next((tmp_path / "m").rglob("__0_0.distcp"))
    if damage == "missing":
        part.unlink()
    elif damage == "truncated":
        part.write_bytes(part.read_bytes()[:1000])
    else:
        (part.parent / ".metadata").unlink()
    arguments = {"src": str(made / "source"), "megatron": str(tmp_path / "m")}
    for error in ranks.errors("export_job", dst=str(tmp_path / "out"), overwrite=False, **arguments):
        assert error.kind == "KimiBridgeError"
        assert "cannot be loaded" in error.message
        assert len(error.message) < 600
    assert not (tmp_path / "out").exists()


def test_export_over_a_checkpoint(made: Path, ranks: Ranks, tmp_path: Path) -> None:
    shutil.copytree(made / "source", tmp_path / "out")
    before = files(tmp_path / "out")
    arguments = {
        "src": str(made / "source"),
        "megatron": str(made / "megatron"),
        "dst": str(tmp_path / "out"),
    }
    for error in ranks.errors("export_job", overwrite=False, **arguments):
        assert "--overwrite" in error.message
    assert files(tmp_path / "out") == before
    ranks.run("export_job", overwrite=True, **arguments)
    assert verify_checkpoints(made / "source", tmp_path / "out").identical


def test_a_failed_export_leaves_the_checkpoint_it_would_have_replaced(ranks: Ranks, tmp_path: Path) -> None:
    # By a NaN in an INT4 weight.
    source = synthesize_checkpoint(tmp_path / "source")
    shutil.copytree(source, tmp_path / "out")
    before = files(tmp_path / "out")
    layout = Layout(tp=2, pp=2, ep=2, etp=1)
    ranks.errors("nan_on_one_rank", src=str(source), dst=str(tmp_path / "out"), layout=layout)
    assert files(tmp_path / "out") == before
    CheckpointReader(tmp_path / "out").check()


def test_export_over_another_familys_checkpoint(made: Path, ranks: Ranks, tmp_path: Path) -> None:
    """Both families' tiny models have the same widths: q_lora_rank and the shared experts tell them apart."""
    [family] = FAMILIES.keys() - {CheckpointReader(made / "source").config.model_type}
    synthesize_checkpoint(tmp_path / "other", family=family)
    arguments = {"src": str(tmp_path / "other"), "megatron": str(made / "megatron")}
    for error in ranks.errors("export_job", dst=str(tmp_path / "out"), overwrite=False, **arguments):
        assert "q_lora_rank" in error.message
        assert "is of another model" in error.message


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("overrides", "layout", "message"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, Layout(tp=2), "3 attention heads"),
        ({"n_routed_experts": 7}, Layout(ep=2), "7 experts"),
        ({"num_experts_per_tok": 99}, Layout(), "99 of 8 experts"),
        ({}, Layout(vp=2), "--pp 2 or more"),
    ],
    ids=["heads", "experts", "top-k", "virtual"],
)
def test_models_and_layouts_that_do_not_fit(
    overrides: dict[str, int], layout: Layout, message: str, family: str, ranks: Ranks, tmp_path: Path
) -> None:
    synthesize_checkpoint(tmp_path / "source", overrides=overrides, family=family)
    for error in ranks.errors("just_load", src=str(tmp_path / "source"), layout=layout):
        assert error.kind == "KimiBridgeError"
        assert message in error.message


@pytest.mark.skipif(HAVE_MEGATRON_CHECKPOINTS, reason="Megatron checkpoints work here")
def test_a_stack_without_megatron_checkpoints_says_so(ranks: Ranks, tmp_path: Path) -> None:
    synthesize_checkpoint(tmp_path / "source")
    source, megatron = str(tmp_path / "source"), str(tmp_path / "megatron")
    for error in ranks.errors("import_job", src=source, megatron=megatron, overwrite=False):
        assert error.kind == "KimiBridgeError"
        assert "Megatron checkpoints need megatron-core 0.19 or newer" in error.message
    assert not (tmp_path / "megatron").exists()
