"""SkyRL (0.3.0, 0.4.0) trains Kimi K2.5-family models from the INT4 checkpoint, with SkyRL's own code.

    python -m kimi_bridge.integrations.skyrl <SkyRL's usual overrides>    # `install` in every Ray worker

`install` imports neither Megatron nor vLLM nor SkyRL: engine workers lack the first, trainers the second. It
acts right after the modules it concerns have been imported, or at once on those that already are. So neither
the order of imports matters nor that of `install` and the imports, and whoever registers a bridge for the
architecture later, SkyRL 0.4.0 for one, is still behind: `MegatronWorker.init_configs` registers once more
just before the bridge is looked up.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from kimi_bridge.errors import KimiBridgeError
from kimi_bridge.integrations.skyrl_checks import check_settings, check_targets
from kimi_bridge.patches import vllm_kimi_k25_lora
from kimi_bridge.ray_env import worker_env_vars

_HOOK = f"{__package__}.skyrl.install"
_TESTED = ("0.3.0", "0.4.0")
_WORKERS = "skyrl.backends.skyrl_train.workers.megatron"
# 0.3.0 has it at the first place, 0.4.0 at the second.
_FAKE_INT4 = (f"{_WORKERS}.fake_int4_qat", f"{_WORKERS}.quantization.fake_int4_qat")
_SYNC_INT4 = (
    "SkyRL's weight sync casts every tensor to one dtype, which destroys packed INT4 codes: train LoRA and"
    " sync the adapter (trainer.policy.model.lora.rank=32"
    " trainer.policy.megatron_config.lora_config.merge_lora=false), or train all weights and serve a bf16"
    " checkpoint (`kimi-bridge dequantize`)."
)
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"

_undo: list[Callable[[], None]] = []


def install() -> str:
    """Makes this process's SkyRL train and serve Kimi K2.5 from INT4. Returns, and logs, what it did.

    In a trainer: `KimiK25TextBridge` handles the architecture, from the INT4 checkpoint itself
    (`trainer.policy.model.path`, or `bf16_base_path`); `language_model_only=false` is an error that says what
    to set; `fake_int4_quantize_ste` is this library's (see `fake_int4`); a sync that would cast packed codes
    to bf16 is an error. In an engine: vLLM accepts LoRA for the model. Idempotent; `uninstall` takes it back.
    """
    if _undo:
        return _say("kimi_bridge is installed in this process already")
    found = _found()
    finder = _AfterImport(_ACTIONS)
    sys.meta_path.insert(0, finder)
    _undo.append(lambda: sys.meta_path.remove(finder))
    had_vllm_patch = vllm_kimi_k25_lora.is_applied()
    done = vllm_kimi_k25_lora.apply()
    if not had_vllm_patch:
        _undo.append(vllm_kimi_k25_lora.undo)
    try:
        for name, action in _ACTIONS.items():
            if (module := sys.modules.get(name)) is not None:
                action(module)
    except BaseException:
        uninstall()
        raise
    return _say(f"{found}; {done}")


def uninstall() -> None:
    """Takes back what `install` did in this process. Models that were built meanwhile stay as they are."""
    while _undo:
        _undo.pop()()


def fake_int4(original: Callable[..., Any]) -> Callable[..., Any]:
    """SkyRL's `fake_int4_quantize_ste` by this library's kernels: same signature, same values.

    They are SkyRL's bits except that a weight rounded to zero gives 0.0, as an engine's dequantized code
    does, where SkyRL's own gives it the weight's sign. A group with NaN or Inf has NaN or Inf on a GPU (in
    SkyRL NaN); on a CPU it raises Int4Error. What these kernels do not take (float32, no matrix, a ragged
    last group) goes to SkyRL's own.
    """

    @functools.wraps(original)
    def fake_int4_quantize_ste(x: Any, group_size: int, scale_div: float, q_min: float) -> Any:
        from kimi_bridge.int4 import fake_quantize_all

        scheme = _scheme([x], group_size, scale_div, q_min)
        if scheme is None:
            return original(x, group_size, scale_div, q_min)
        return fake_quantize_all([x], scheme)[0]

    return fake_int4_quantize_ste


def runtime_env(given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ray's runtime_env with `install` as the workers' setup hook, and this process's Hugging Face variables.

    What `given` has wins, and what the runtime_env of a submitted Ray job has is left out: Ray merges the
    two, and takes no name twice. Secrets are not shown when it is printed (see `worker_env_vars`).
    Raises KimiBridgeError where `given` or the job has another setup hook: Ray calls one.
    """
    env = dict(given or {})
    job = json.loads(os.environ.get(_JOB, "{}")).get("runtime_env") or {}
    for hook in (env.pop("worker_process_setup_hook", None), job.get("worker_process_setup_hook")):
        if hook not in (None, _HOOK, install):
            raise KimiBridgeError(
                f"the runtime_env has a worker_process_setup_hook ({hook}), and Ray calls one alone: call"
                f" {_HOOK}() in that one, and start SkyRL as it is."
            )
    if "worker_process_setup_hook" not in job:
        env["worker_process_setup_hook"] = _HOOK
    ours, theirs = worker_env_vars(), job.get("env_vars") or {}
    for name in ours.keys() & theirs.keys():
        del ours[name]
    env["env_vars"] = ours | (env.get("env_vars") or {})
    return env


def main(arguments: Sequence[str] | None = None) -> int:
    """SkyRL's entry point, with the plugin in this process and in every Ray worker."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_HELP)
        return 0
    if not _exists("skyrl"):
        print(
            "error: SkyRL is not installed here: pip install it, or run this in SkyRL's environment.",
            file=sys.stderr,
        )
        return 1
    import ray

    install()
    init = ray.init
    ray.init = lambda *args, **kwargs: init(
        *args, **{**kwargs, "runtime_env": runtime_env(kwargs.get("runtime_env"))}
    )
    from skyrl.train.entrypoints import main_base

    sys.argv[1:] = arguments
    main_base.main()
    return 0


def _scheme(weights: Sequence[Any], group_size: int, scale_div: float, q_min: float) -> Any:
    """The scheme, if these are matrices that `fake_quantize_all` does in one launch with SkyRL's values."""
    import torch

    from kimi_bridge.int4 import Int4Scheme

    plain = (torch.Tensor, torch.nn.Parameter)
    kinds = {(weight.shape, weight.dtype, weight.device) for weight in weights if type(weight) in plain}
    if len(kinds) != 1 or not all(type(weight) in plain for weight in weights):
        return None
    shape, dtype, _ = kinds.pop()
    # float32: CUDA divides by a Python number with another rounding, which 16-bit scales do not show.
    if dtype not in (torch.bfloat16, torch.float16) or len(shape) != 2 or 0 in shape:
        return None
    try:
        if shape[1] % group_size or q_min != int(q_min):
            return None
        return Int4Scheme(group_size, float(scale_div), int(q_min))
    except (ArithmeticError, TypeError, ValueError):
        # SkyRL's own function says what it makes of them.
        return None


def _register(module: ModuleType) -> None:
    """After Megatron-Bridge, and after SkyRL's own bridges."""
    by_others = "kimi_bridge.megatron" in sys.modules
    import kimi_bridge.megatron as kimi

    # Not there while kimi_bridge.megatron is what imports Megatron-Bridge: it registers at its end.
    if hasattr(kimi, "register"):
        if not (by_others and kimi.is_registered()):
            _undo.append(kimi.unregister)
        kimi.register()


def _know_config(module: ModuleType) -> None:
    """Processes without Megatron read the config, too; this class needs no remote code."""
    import kimi_bridge.checkpoint.config  # noqa: F401


def _replace_fake_int4(module: ModuleType) -> None:
    _set(module, "fake_int4_quantize_ste", fake_int4(module.fake_int4_quantize_ste))
    _set(module, "install_fake_int4_qat", _in_one_launch(module, module.install_fake_int4_qat))


def _in_one_launch(module: ModuleType, original: Callable[..., None]) -> Callable[..., None]:
    """SkyRL's patch of TEGroupedLinear, with all experts of a linear in one launch instead of one each."""

    @functools.wraps(original)
    def install_fake_int4_qat(group_size: int, scale_divisor: float, q_min: float) -> None:
        if module._installed:  # type: ignore[attr-defined]
            return
        from kimi_bridge.int4 import fake_quantize_all
        from kimi_bridge.megatron.compat import grouped_linear

        experts = grouped_linear()
        masters = experts._get_weight_tensors
        original(group_size, scale_divisor, q_min)
        one_by_one = experts._get_weight_tensors

        def _get_weight_tensors(linear: Any) -> list[Any]:
            weights = masters(linear)
            scheme = _scheme(weights, group_size, scale_divisor, q_min)
            return one_by_one(linear) if scheme is None else fake_quantize_all(weights, scheme)

        _set(experts, "_get_weight_tensors", _get_weight_tensors)

    return install_fake_int4_qat


def _guard_worker(module: ModuleType) -> None:
    """Before SkyRL looks for a bridge: text only, and this library's one in front."""
    worker: Any = module.MegatronWorker  # type: ignore[attr-defined]
    original = worker.init_configs
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_configs(*args: Any, **kwargs: Any) -> Any:
        import kimi_bridge.megatron as kimi

        given = signature.bind(*args, **kwargs).arguments
        if (config := _kimi_config(given["model_path"])) is not None:
            kimi.ensure_text_only(config, given.get("language_model_only", False))
            check_settings(given["self"].cfg, given["model_path"], given.get("bridge_weights_path"))
            kimi.register()
        return original(*args, **kwargs)

    _set(worker, "init_configs", init_configs)
    configure = worker.configure_lora

    @functools.wraps(configure)
    def configure_lora(self: Any, *args: Any, **kwargs: Any) -> None:
        configure(self, *args, **kwargs)
        from kimi_bridge.megatron.pretrained import KimiPretrained

        if isinstance(pretrained := self.bridge.hf_pretrained, KimiPretrained):
            check_targets(self.lora_cls, pretrained.config.text_config)

    _set(worker, "configure_lora", configure_lora)
    if hasattr(module, "MegatronWeightExtractor"):  # 0.3.0
        extractor = module.MegatronWeightExtractor
        _set(extractor, "_ensure_buckets_initialized", _refusing_int4(extractor._ensure_buckets_initialized))


def _guard_sync(module: ModuleType) -> None:
    """0.4.0's weight sync."""
    source: Any = module.MegatronWeightSource  # type: ignore[attr-defined]
    _set(source, "_export", _refusing_int4(source._export))


def _refusing_int4(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: Any) -> Any:
        from kimi_bridge.megatron.pretrained import KimiPretrained, install_source

        pretrained = getattr(self, "bridge", None) or self._bridge
        pretrained = pretrained.hf_pretrained
        if isinstance(pretrained, KimiPretrained) and install_source(pretrained).reader.quantization:
            raise KimiBridgeError(_SYNC_INT4)
        return method(self)

    return wrapped


def _kimi_config(model_path: str) -> SimpleNamespace | None:
    """config.json of a Kimi checkpoint, without running its code; None for any other model."""
    from transformers import PretrainedConfig

    from kimi_bridge.checkpoint import FAMILIES

    content, _ = PretrainedConfig.get_config_dict(model_path)
    return SimpleNamespace(**content) if content.get("model_type") in FAMILIES else None


_ACTIONS: dict[str, Callable[[ModuleType], None]] = {
    "megatron.bridge": _register,
    "skyrl.utils.tok": _know_config,
    f"{_WORKERS}.model_bridges": _register,
    f"{_WORKERS}.megatron_worker": _guard_worker,
    "skyrl.backends.skyrl_train.weight_sync.sources": _guard_sync,
    **dict.fromkeys(_FAKE_INT4, _replace_fake_int4),
}


class _AfterImport(MetaPathFinder):
    """Calls an action with each of some modules, right after its code has run."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]):
        self.actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        action = self.actions.get(fullname)
        if action is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                # A fault must show: training on without the plugin would train another model.
                action(module)

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def _set(owner: Any, name: str, value: Any) -> None:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    _undo.append(lambda: setattr(owner, name, before))


def _found() -> str:
    """What the plugin does in this process, told without importing any of it."""
    if not _exists("skyrl"):
        return "kimi_bridge: SkyRL is not installed here"
    try:
        known = version("skyrl")
    except PackageNotFoundError:
        known = "of no known version"
    parts = [f"kimi_bridge is installed for SkyRL {known}"]
    if not known.startswith(_TESTED):
        parts.append(f"it was tested with {' and '.join(_TESTED)}")
    if _exists("megatron.bridge"):
        parts.append("KimiK25TextBridge is in front whenever Megatron-Bridge is imported")
    else:
        parts.append("Megatron-Bridge is not here, so there is no bridge to register")
    if any(_exists(name) for name in _FAKE_INT4):
        parts.append("fake_int4_quantize_ste is this library's")
    else:
        parts.append("this SkyRL has no fake_int4_quantize_ste to replace")
    return "; ".join(parts)


def _exists(module: str) -> bool:
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    places = [Path(folder).joinpath(*rest) for folder in folders]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)


def _say(sentence: str) -> str:
    logger: Any = logging.getLogger("kimi_bridge.skyrl")
    # SkyRL's own logger, which prints in a Ray worker.
    with contextlib.suppress(ImportError):
        from loguru import logger
    logger.info(sentence)
    return sentence


_HELP = f"""\
usage: python -m kimi_bridge.integrations.skyrl <overrides of skyrl.train.entrypoints.main_base>

Runs SkyRL's entry point with kimi_bridge as a plugin: ray.init gets {_HOOK}
as worker_process_setup_hook, so that every Ray worker trains and serves Kimi K2.5-family models from
the INT4 checkpoint, and the Hugging Face variables of this process (HF_HOME, HF_TOKEN, ...) as env_vars.
Secrets are not printed here, but Ray writes every runtime_env into its own log files: unset HF_TOKEN to
leave it to the token file (hf auth login).

  python -m kimi_bridge.integrations.skyrl trainer.strategy=megatron \\
      trainer.policy.model.path=/models/Kimi-K2.5 trainer.policy.language_model_only=true \\
      trainer.ref.language_model_only=true generator.inference_engine.language_model_only=true ...
"""

if __name__ == "__main__":
    # Ray workers import this module by its name, and `install` keeps its state there.
    from kimi_bridge.integrations import skyrl

    sys.exit(skyrl.main())
