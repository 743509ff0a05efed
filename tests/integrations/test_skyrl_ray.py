"""`python -m kimi_bridge.integrations.skyrl` on a real local Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_bridge.checkpoint import synthesize_checkpoint
from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.integrations import skyrl
from tests.integrations.skyrl_worker import overrides

pytest.importorskip("skyrl")

ROOT = Path(__file__).parents[2]
TOKEN = "hf_a_token_that_nobody_prints"
ONE_GPU = (
    "trainer.placement.policy_num_gpus_per_node=1",
    "trainer.placement.ref_num_gpus_per_node=1",
    "trainer.placement.critic_num_gpus_per_node=1",
    "generator.inference_engine.tensor_parallel_size=1",
)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "kimi_bridge.integrations.skyrl", *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"PYTHONPATH": path} | environment,
        check=False,
    )


def test_every_worker_has_the_plugin_and_the_environment(tmp_path: Path) -> None:
    source = synthesize_checkpoint(tmp_path / "tiny")
    done = run(
        *overrides(str(source), lora=8),
        *ONE_GPU,
        f"trainer.log_path={tmp_path}",
        "trainer.override_entrypoint=tests.integrations.ray_entry",
        HF_HOME=str(tmp_path / "hf"),
        HF_TOKEN=TOKEN,
        RAY_TMPDIR="/tmp",
        # As `ray job submit` starts it.
        RAY_JOB_CONFIG_JSON_ENV_VAR=json.dumps(
            {"runtime_env": {"env_vars": {"HF_HOME": str(tmp_path / "hf")}}}
        ),
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert len(lines) == 1, done.stdout + done.stderr
    report = json.loads(lines[0].removeprefix("REPORT "))
    for place, engine in (("task", None), ("engine", "1")):
        seen = report[place]
        assert seen["installed"], place
        assert seen["heavy"] == [], "the hook itself imports neither"
        assert seen["hf_home"] == str(tmp_path / "hf")
        assert seen["token"] == TOKEN
        assert seen["engine"] == engine
        assert seen["skyrls"] == "1", "SkyRL's own variables are still there"
    assert report["model"]["bridge"] == "kimi_bridge.megatron.bridge.KimiK25TextBridge"
    assert report["model"]["model"] == "GPTModel"
    assert report["model"]["adapters"] > 20
    printed = (done.stdout + done.stderr).replace(lines[0], "")
    assert TOKEN not in printed
    assert "kimi_bridge is installed for SkyRL 0.3.0" in printed


@pytest.mark.parametrize("arguments", [[], ["--help"], ["trainer.strategy=megatron", "-h"]])
def test_help(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "worker_process_setup_hook" in done.stdout
    assert "trainer.policy.language_model_only=true" in done.stdout


def test_runtime_env_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/models/hf")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    env = skyrl.runtime_env({"env_vars": {"HF_HOME": "/other", "NCCL_DEBUG": "INFO"}, "pip": ["x"]})
    assert env["worker_process_setup_hook"] == "kimi_bridge.integrations.skyrl.install"
    assert env["pip"] == ["x"]
    assert env["env_vars"]["HF_HOME"] == "/other"
    assert env["env_vars"]["NCCL_DEBUG"] == "INFO"
    assert env["env_vars"]["HF_TOKEN"] == TOKEN
    assert TOKEN not in repr(env)
    assert skyrl.runtime_env()["env_vars"]["HF_HOME"] == "/models/hf"
    for hook in (None, skyrl.install, "kimi_bridge.integrations.skyrl.install"):
        env = skyrl.runtime_env({"worker_process_setup_hook": hook, "env_vars": None})
        assert env["worker_process_setup_hook"] == "kimi_bridge.integrations.skyrl.install"
    assert TOKEN not in repr(skyrl.runtime_env({"env_vars": {"PORT": 80}}))
    with pytest.raises(KimiBridgeError, match=r"my\.hook"):
        skyrl.runtime_env({"worker_process_setup_hook": "my.hook"})


def test_runtime_env_leaves_to_a_job_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray merges both, and takes no name twice."""
    monkeypatch.setenv("HF_HOME", "/models/hf")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def under(**job: Any) -> dict[str, Any]:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": job}))
        return skyrl.runtime_env({"env_vars": {"NCCL_DEBUG": "INFO"}})

    env = under(
        env_vars={"HF_HOME": "/jobs"}, worker_process_setup_hook="kimi_bridge.integrations.skyrl.install"
    )
    assert "worker_process_setup_hook" not in env
    assert "HF_HOME" not in env["env_vars"]
    assert env["env_vars"]["HF_HUB_OFFLINE"] == "1"
    assert env["env_vars"]["NCCL_DEBUG"] == "INFO"
    assert under()["env_vars"]["HF_HOME"] == "/models/hf"
    with pytest.raises(KimiBridgeError, match=r"jobs\.hook"):
        under(worker_process_setup_hook="jobs.hook")
