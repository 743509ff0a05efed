"""Declares vLLM's Kimi K2.5 and Kimi-VL models LoRA-capable, as the decoder inside them is.

vLLM's gate is an isinstance check of the runtime-checkable Protocol SupportsLoRA, which wants every
member to exist. The members are read from that Protocol when the patch is applied, their values from
the decoder's class, so that a member that a later vLLM adds is covered. `packed_modules_mapping` is the
decoder's own dict: the decoder adds `fused_qkv_a_proj` to it when it is built.

vLLM 0.26 to 0.33 accept LoRA on `kv_b_proj` and never apply it: MLA computes with the weight it absorbed
when loading (vLLM issue 48974). Nor on the router (`mlp.gate`): the experts call the one that they were
built with, while LoRA is put around another reference to it. Such adapters are refused here, where they
would be served in part.

pyproject.toml names `apply` as a vLLM plugin (group `vllm.general_plugins`), so every process of vLLM
calls it. KIMI_BRIDGE_VLLM_LORA=0 turns it off.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

SWITCH = "KIMI_BRIDGE_VLLM_LORA"


class _Target(NamedTuple):
    """A class of vLLM, and what it calls the layers between vision tower and decoder."""

    module: str
    name: str
    connector: str


_TARGETS = (
    _Target(
        "vllm.model_executor.models.kimi_k25", "KimiK25ForConditionalGeneration", connector="mm_projector"
    ),
    _Target(
        "vllm.model_executor.models.kimi_vl",
        "KimiVLForConditionalGeneration",
        connector="multi_modal_projector",
    ),
)
_MARK = "kimi_bridge_lora_members"
_BEFORE = "kimi_bridge_lora_before"
_ABSENT = object()

# Below vLLM's own logger, whose handlers print it: this library's loggers have none in a vLLM process.
_logger = logging.getLogger("vllm.kimi_bridge")


def apply() -> str:
    """Declares the classes LoRA-capable, now or when vLLM imports them. Returns what it did, a sentence each.

    Does nothing where a class supports LoRA already, where vLLM is not installed or has no such class,
    and with KIMI_BRIDGE_VLLM_LORA=0. vLLM imports models late, and some of them touch the GPU when
    imported, so this never imports a model itself.
    """
    if os.environ.get(SWITCH, "1").strip().lower() in ("0", "false", "off", "no"):
        return f"{SWITCH} is off: vLLM is left as it is."
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed."
    return " ".join(_apply_to(target) for target in _TARGETS)


def is_applied() -> bool:
    """Whether `apply` has changed the classes, or waits for them to be imported."""
    waiting = [finder.target for finder in _waiting()]
    return all(
        target in waiting or _MARK in getattr(_imported(target), "__dict__", ()) for target in _TARGETS
    )


def undo() -> None:
    """Takes back what `apply` did. Models that were built meanwhile keep their adapters."""
    for finder in _waiting():
        sys.meta_path.remove(finder)
    for model in filter(None, map(_imported, _TARGETS)):
        for name, before in model.__dict__.get(_BEFORE, {}).items():
            delattr(model, name) if before is _ABSENT else setattr(model, name, before)
        for name in (_MARK, _BEFORE):
            if name in model.__dict__:
                delattr(model, name)


def _apply_to(target: _Target) -> str:
    if (model := _imported(target)) is not None:
        return _declare(model, target)
    if target not in (finder.target for finder in _waiting()):
        sys.meta_path.insert(0, _WhenImported(target))
    return f"{target.name} will accept LoRA once vLLM imports it."


def _waiting() -> list[_WhenImported]:
    return [finder for finder in sys.meta_path if isinstance(finder, _WhenImported)]


def _imported(target: _Target) -> type | None:
    return getattr(sys.modules.get(target.module), target.name, None)


def _declare(model: type, target: _Target) -> str:
    """Gives `model` every member of SupportsLoRA that it lacks, and get_mm_mapping."""
    from typing_extensions import get_protocol_members
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM
    from vllm.model_executor.models.interfaces import SupportsLoRA, supports_lora

    declared: set[str] = model.__dict__.get(_MARK, set())
    before: dict[str, Any] = model.__dict__.get(_BEFORE, {})
    if not declared and supports_lora(model):
        return _say(f"{target.name} accepts LoRA without this library: nothing done.")
    members = set(get_protocol_members(SupportsLoRA)) - declared
    for name in members | {"lora_manager", "get_mm_mapping"}:
        before.setdefault(name, model.__dict__.get(name, _ABSENT))
    for name in members:
        setattr(model, name, _member(DeepseekV2ForCausalLM, name))
    model.lora_manager = property(_get_manager, _set_manager)  # type: ignore[attr-defined]
    if not hasattr(model, "get_mm_mapping"):
        model.get_mm_mapping = _mm_mapping(target.connector)  # type: ignore[attr-defined]
    setattr(model, _MARK, declared | members)
    setattr(model, _BEFORE, before)
    if not supports_lora(model):
        _logger.warning(
            "%s still does not pass vLLM's check for LoRA: report it with vLLM's version.", target.name
        )
    if not members:
        return f"{target.name} accepts LoRA since an earlier call."
    return _say(f"{target.name} accepts LoRA now (declared: {', '.join(sorted(members))}).")


def _say(sentence: str) -> str:
    _logger.info(sentence)
    return sentence


def _member(decoder: type, name: str) -> Any:
    """The decoder's value of a member; None for one that is only annotated there, like `lora_manager`.

    What is computed from the instance is asked of the decoder inside the model, not of the model.
    """
    value = getattr(decoder, name, None)
    if inspect.isfunction(value):
        return lambda self, *args, **kwargs: getattr(self.language_model, name)(*args, **kwargs)
    if isinstance(value, property):
        return property(lambda self: getattr(self.language_model, name))
    return value


def _get_manager(self: Any) -> Any:
    return self.__dict__.get("_lora_manager")


def _set_manager(self: Any, manager: Any) -> None:
    """vLLM sets this attribute once it has wrapped the model's layers.

    What is not in `supported_lora_modules` vLLM refuses when an adapter names it.
    """
    self.__dict__["_lora_manager"] = manager
    if manager is None:
        return
    ignored = {}
    if any(type(module).__name__ == "MLAAttention" for module in self.modules()):
        ignored["kv_b_proj"] = "MLA"
    if _router_is_bypassed(self):
        ignored["gate"] = "experts"
    for name, part in ignored.items():
        if name in manager.supported_lora_modules:
            manager.supported_lora_modules.remove(name)
            _logger.info(
                "Adapters on %s are refused: vLLM's %s would not apply them. Merge such an adapter.",
                name,
                part,
            )


def _router_is_bypassed(model: Any) -> bool:
    """Whether a module calls a router from under the layer that adds LoRA to it."""
    wrapped = {
        id(module.base_layer)
        for name, module in model.named_modules()
        if name.endswith(".gate") and hasattr(module, "base_layer")
    }
    return any(id(getattr(module, "gate", None)) in wrapped for module in model.modules())


def _mm_mapping(connector: str) -> Callable[[Any], Any]:
    """A method that tells vLLM which parts are which: it puts LoRA on the language model alone."""

    def get_mm_mapping(_self: Any) -> Any:
        from vllm.model_executor.models.module_mapping import MultiModelKeys

        return MultiModelKeys.from_string_field(
            language_model="language_model", connector=connector, tower_model="vision_tower"
        )

    return get_mm_mapping


class _WhenImported(MetaPathFinder):
    """Finds a model's module like everyone else, and declares the class right after it was executed."""

    def __init__(self, target: _Target) -> None:
        self.target = target

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.target.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_declare(module: ModuleType) -> None:
            execute(module)
            # A fault here must not take a working vLLM down: it then says itself what it does not support.
            try:
                _declare(getattr(module, self.target.name), self.target)
            except Exception:
                message = "%s could not be declared LoRA-capable (%s=0 skips this)"
                _logger.exception(message, self.target.name, SWITCH)

        spec.loader.exec_module = execute_and_declare  # type: ignore[method-assign]
        return spec
