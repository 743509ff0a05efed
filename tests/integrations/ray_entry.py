"""What test_skyrl_ray.py runs as SkyRL's entry point, by SkyRL's own trainer.override_entrypoint.

It starts Ray as SkyRL does, and prints what workers see: a task, an actor with a runtime_env of its own (as
SkyRL gives its engines), and a task that builds SkyRL's Megatron worker.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray


def main() -> None:
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils.utils import initialize_ray

    arguments = [each for each in sys.argv[1:] if not each.startswith("trainer.override_entrypoint=")]
    config = SkyRLTrainConfig.from_cli_overrides(arguments)
    initialize_ray(config)
    engine = Engine.options(runtime_env={"env_vars": {"OF_THE_ENGINE": "1"}}).remote()
    report = {
        "task": ray.get(ray.remote(what_a_worker_sees).remote()),
        "engine": ray.get(engine.look.remote()),
        "model": ray.get(ray.remote(build_the_model).remote(arguments)),
    }
    print("REPORT " + json.dumps(report), flush=True)
    ray.shutdown()


def what_a_worker_sees() -> dict[str, Any]:
    from kimi_bridge.integrations import skyrl

    return {
        "installed": bool(skyrl._undo),
        "heavy": [name for name in ("megatron", "vllm") if name in sys.modules],
        "hf_home": os.environ.get("HF_HOME"),
        "token": os.environ.get("HF_TOKEN"),
        "engine": os.environ.get("OF_THE_ENGINE"),
        "skyrls": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
    }


@ray.remote(num_cpus=0)
class Engine:
    def look(self) -> dict[str, Any]:
        return what_a_worker_sees()


def build_the_model(arguments: list[str]) -> dict[str, Any]:
    import torch.distributed as dist

    from tests.integrations import skyrl_worker

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    worker = skyrl_worker.build(skyrl_worker.make(arguments))
    bridge = type(worker.bridge._model_bridge)
    return {
        "bridge": f"{bridge.__module__}.{bridge.__name__}",
        "model": type(worker.actor_module[0].module).__name__,
        "adapters": sum("adapter" in name for name, _ in worker.actor_module[0].named_parameters()),
    }
