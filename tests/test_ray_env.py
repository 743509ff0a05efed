"""Ray workers find what the driver finds; nobody sees the token."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import pprint
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_bridge.ray_env import EnvVars, worker_env_vars

TOKEN = "hf_a_secret_that_nobody_may_see"
REPOSITORY = "example/kimi"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING", "TRANSFORMERS_", "XDG_CACHE")):
            monkeypatch.delenv(name)
    return monkeypatch


def test_what_is_set_and_nothing_else(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert worker_env_vars() == {}
    values = {
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_TOKEN_PATH": str(tmp_path / "token"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
    }
    for name, value in (values | {"AWS_SECRET_ACCESS_KEY": "x", "CUDA_VISIBLE_DEVICES": "0"}).items():
        environment.setenv(name, value)
    assert worker_env_vars() == values
    assert worker_env_vars(secrets=False) == {name: values[name] for name in values if name != "HF_TOKEN"}


def test_paths_mean_the_same_elsewhere(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.chdir(tmp_path)
    environment.setenv("HOME", str(tmp_path / "me"))
    environment.setenv("HF_HUB_CACHE", "models")
    environment.setenv("HF_TOKEN_PATH", "~/token")
    environment.setenv("HF_XET_CACHE", "~no-such-user/xet")
    environment.setenv("XDG_CACHE_HOME", "cache")
    assert worker_env_vars() == {
        "HF_HOME": str(tmp_path / "cache/huggingface"),
        "HF_HUB_CACHE": str(tmp_path / "models"),
        "HF_TOKEN_PATH": str(tmp_path / "me/token"),
        "HF_XET_CACHE": str(tmp_path / "~no-such-user/xet"),
    }


def test_secrets_are_not_shown(environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from rich.console import Console

    environment.setenv("HF_TOKEN", TOKEN)
    environment.setenv("HUGGING_FACE_HUB_TOKEN", TOKEN)
    environment.setenv("HF_ENDPOINT", f"https://me:a/{TOKEN}@mirror.example/")
    environment.setenv("HF_HUB_OFFLINE", "1")
    variables = worker_env_vars()
    screen = io.StringIO()
    Console(file=screen).print(variables, {"env_vars": variables})
    logging.getLogger("job").warning("%s %r", variables, {"runtime_env": {"env_vars": variables}})
    shown = [
        repr(variables),
        f"{variables} {variables!r}",
        pprint.pformat({"env_vars": variables}),
        repr(variables | {"A": "b"}),
        repr({"A": "b"} | variables),
        repr(variables.copy()),
        repr(pickle.loads(pickle.dumps(variables))),
        screen.getvalue(),
        caplog.text,
    ]
    assert not [text for text in shown if TOKEN in text]
    assert all("HF_HUB_OFFLINE" in text for text in shown)
    assert isinstance(variables, dict)
    assert variables["HF_TOKEN"] == json.loads(json.dumps(variables))["HF_TOKEN"] == TOKEN


@pytest.fixture
def cluster(environment: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A local Ray cluster that was started before the driver chose its cache."""
    ray = pytest.importorskip("ray")
    environment.setenv("HOME", str(tmp_path / "home"))
    environment.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Its sockets lie there, whose paths are short.
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(folder),
    )
    ray.folder = folder
    yield ray
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_worker_resolves_a_model_as_the_driver(
    cluster: Any, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commit = "0" * 40
    folder = tmp_path / "cache/hub" / f"models--{REPOSITORY.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(commit)
    (tmp_path / "cache/token").write_text("hf_of_the_file")
    environment.chdir(tmp_path)
    environment.setenv("HF_HOME", "cache")
    environment.setenv("HF_HUB_OFFLINE", "1")
    environment.setenv("HF_TOKEN", TOKEN)

    def resolve() -> tuple[str, str | None]:
        from huggingface_hub import get_token, snapshot_download

        try:
            return snapshot_download(REPOSITORY, local_files_only=True), get_token()
        except FileNotFoundError as error:
            return type(error).__name__, get_token()

    task = cluster.remote(num_cpus=1)(resolve)
    unlogged = task.options(runtime_env={"env_vars": worker_env_vars(secrets=False)}).remote()
    assert cluster.get(unlogged, timeout=240) == (str(snapshot), "hf_of_the_file")
    logs = [path.read_text(errors="replace") for path in cluster.folder.rglob("*.log")]
    assert any(str(tmp_path / "cache") in text for text in logs)
    assert not any(TOKEN in text for text in logs)

    with_variables = task.options(runtime_env={"env_vars": worker_env_vars()}).remote()
    assert cluster.get(with_variables, timeout=240) == (str(snapshot), TOKEN)
    place, token = cluster.get(task.remote(), timeout=240)
    assert place == "LocalEntryNotFoundError"
    assert token is None


def test_masking_needs_no_environment() -> None:
    assert EnvVars(HF_TOKEN="x", A_KEY="y", HF_HOME="/h").masked() == {
        "HF_TOKEN": "***",
        "A_KEY": "***",
        "HF_HOME": "/h",
    }
