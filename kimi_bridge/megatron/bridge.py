"""`KimiK25TextBridge`: the text model of a Kimi K2.5 or Kimi-VL checkpoint as a Megatron-Core GPTModel.

It is Megatron-Bridge's DeepSeek-V3 bridge with three differences: the config is `text_config`, the
checkpoint's names begin with `language_model.`, and the routed experts may be INT4. Importing
`kimi_bridge.megatron` registers it for the architecture of every row of `kimi_bridge.checkpoint.FAMILIES`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import (
    MegatronModelBridge,
    WeightConversionTask,
    get_model_bridge,
    stream_weights_megatron_to_hf,
    stream_weights_megatron_to_hf_quant,
)
from megatron.bridge.models.deepseek.common import get_common_mapping_list
from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepSeekV3Bridge
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers.configuration_utils import PretrainedConfig

from kimi_bridge.checkpoint.families import FAMILIES, TEXT_PREFIX, VISION_PREFIXES, is_carried
from kimi_bridge.errors import CheckpointError, KimiBridgeError
from kimi_bridge.megatron import transfer
from kimi_bridge.megatron.collective import on_every_rank
from kimi_bridge.megatron.config_checks import check_text_config
from kimi_bridge.megatron.expert_lora import correct_expert_adapters, undo_correction
from kimi_bridge.megatron.pretrained import (
    KimiStateSource,
    install_source,
    use_pretrained_class,
    use_upstreams_class,
)
from kimi_bridge.megatron.spec import correct_direct_queries, leave_direct_queries

_TEXT_ONLY = (
    "Kimi K2.5 and Kimi-VL checkpoints train text-only: the vision tower stays frozen in the inference"
    " engine. Set language_model_only=True where you build the model (SkyRL:"
    " trainer.policy.language_model_only=true trainer.ref.language_model_only=true"
    " generator.inference_engine.language_model_only=true)."
)


class KimiK25TextBridge(DeepSeekV3Bridge):
    """Kimi K2.5's text model <-> GPTModel.

    Mappings are those of `megatron.bridge.models.deepseek.common`, with `language_model.` before every
    checkpoint name. A routed expert's triplet (`weight_packed`, `weight_scale`, `weight_shape`) is one
    weight, `....gate_proj.weight`, on the way in and becomes a triplet again on the way out.
    """

    def provider_bridge(self, hf_pretrained: Any) -> MLAModelProvider:
        """The provider that `text_config` implies. Vision settings are not read.

        The routers' `expert_bias` keeps the checkpoint's values: Megatron's finalize_model_grads would move
        it at every step by `moe_router_bias_update_rate`, also under frozen weights, and no adapter could
        carry that to the engine. Who pretrains sets the rate on the provider.

        Raises:
            CheckpointError: settings that the Megatron model does not implement, or that cannot be.
        """
        config = hf_pretrained.config
        check_text_config(config.text_config)
        text = copy.copy(config.text_config)
        # Some files state the weights' dtype on the top level alone.
        text.dtype = text.dtype or config.dtype or torch.bfloat16
        provider = super().provider_bridge(SimpleNamespace(config=text))
        # The unified checkpoint states tying on the top level; text_config only repeats a default.
        provider.share_embeddings_and_output_weights = bool(config.tie_word_embeddings)
        provider.moe_router_bias_update_rate = 0.0
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        """DeepSeek-V3's mappings, re-rooted under `language_model.`, for both layer specs."""
        mappings = get_common_mapping_list(hf_config=self.hf_config.text_config)
        return _TextMappings(*(reroot(mapping, TEXT_PREFIX) for mapping in mappings))

    def build_conversion_tasks(
        self, hf_pretrained: Any, megatron_model: Any, *args: Any, **kwargs: Any
    ) -> list[WeightConversionTask]:
        """One task a parameter of this pipeline's ranks; what upstream skips with a warning raises here.

        Raises:
            CheckpointError: a Megatron parameter without a mapping, a weight that the checkpoint lacks, or
                a text weight of the checkpoint that the model has no place for. Every rank raises the same.
        """
        models = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        source = None if isinstance(hf_pretrained, PretrainedConfig) else install_source(hf_pretrained)
        self.hf_config = getattr(hf_pretrained, "config", hf_pretrained)
        _check_coverage(self, models, source)
        tasks = super().build_conversion_tasks(hf_pretrained, models, *args, **kwargs)
        return [task for task in tasks if task is not None]

    def load_weights_hf_to_megatron(
        self, hf_pretrained: Any, megatron_model: Any, allowed_mismatched_params: list[str] | None = None
    ) -> list[torch.nn.Module]:
        """Loads the text weights. Each rank reads and dequantizes its own slices, without collectives.

        Args:
            hf_pretrained: the checkpoint, as `AutoBridge.from_hf_pretrained` wraps it.
            megatron_model: this rank's model chunks.
            allowed_mismatched_params: not supported: a weight of another shape is an error here.

        Raises:
            CheckpointError: on every rank, before anything is loaded, when the checkpoint does not fit.
        """
        if allowed_mismatched_params:
            raise KimiBridgeError(
                "allowed_mismatched_params is not supported: a parameter left as it was initialised trains on"
                " random values. Truncate the checkpoint to the model instead, with `kimi-bridge truncate`."
            )
        models = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        source = install_source(hf_pretrained)
        tasks = self.build_conversion_tasks(hf_pretrained, transfer.unwrap(models))
        transfer.load(tasks, source.reader)
        self._broadcast_shared_embeddings(models)
        return models

    def stream_weights_megatron_to_hf(
        self,
        megatron_model: Any,
        hf_pretrained: Any,
        cpu: bool = True,
        show_progress: bool = True,
        conversion_tasks: Sequence[WeightConversionTask] | None = None,
        merge_adapter_weights: bool = True,
        weight_dtype: torch.dtype | None = None,
    ) -> transfer.WeightStream:
        """Checkpoint tensors from all ranks' shards: an iterator of `(name, tensor)` on every rank.

        Experts leave as INT4 triplets where the source has them so, bit for bit the source's where the
        values are still those; with `weight_dtype` everything leaves as plain tensors of that dtype.

        Raises:
            KimiBridgeError: adapters in the model (export them apart), FP8 weights, a tensor-parallel shard
                that splits a quantization group.
        """
        del merge_adapter_weights  # there is nothing to merge: a model with adapters is refused
        models = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        source = install_source(hf_pretrained)
        if conversion_tasks is None:
            conversion_tasks = self.build_conversion_tasks(hf_pretrained, transfer.unwrap(models))
        elif weight_dtype is not None:
            raise KimiBridgeError("give either conversion_tasks or weight_dtype, not both.")
        self._refuse_adapters(models)
        return transfer.WeightStream(
            conversion_tasks, source.reader, weight_dtype=weight_dtype, cpu=cpu, show_progress=show_progress
        )

    def _refuse_adapters(self, models: list[torch.nn.Module]) -> None:
        for model in models:
            for name, _ in model.named_parameters():
                if self._is_adapter_param_name(name):
                    raise KimiBridgeError(
                        f"the model holds adapters ({name}), which an INT4 export cannot merge exactly:"
                        " export the adapter by itself with kimi_bridge.megatron.export_adapter, and merge"
                        " it with `kimi-bridge merge-adapter`."
                    )


class KimiVLTextBridge(KimiK25TextBridge):
    """Kimi-VL's text model <-> GPTModel: the same, under the name of another row."""


_BRIDGES = {"kimi_k25": KimiK25TextBridge, "kimi_vl": KimiVLTextBridge}


class _TextMappings(MegatronMappingRegistry):
    """A registry that answers a request for vision parameters with the reason there are none."""

    def megatron_to_hf_lookup(self, megatron_param_name: str) -> Any:
        _refuse_vision(megatron_param_name)
        return super().megatron_to_hf_lookup(megatron_param_name)

    def hf_to_megatron_lookup(self, hf_param_name: str) -> Any:
        _refuse_vision(hf_param_name)
        return super().hf_to_megatron_lookup(hf_param_name)


def reroot(mapping: Any, prefix: str) -> Any:
    """A copy of an upstream mapping whose checkpoint names begin with `prefix`."""
    mapping = copy.copy(mapping)
    names = mapping.hf_param
    if isinstance(names, str):
        mapping.hf_param = prefix + names
    else:
        mapping.hf_param = {part: prefix + name for part, name in names.items()}
    return mapping


def register() -> None:
    """Puts the bridges in front of whatever holds their architectures' names. Idempotent.

    Importing this module has imported megatron.bridge, so upstream's VL bridge has registered already:
    the registry keeps the last one.
    """
    for dispatcher in _DISPATCHERS:
        for key in _keys():
            entry = dispatcher._exact_types.get(key)
            if entry is not _registered.get((dispatcher, key)):
                _before[dispatcher, key] = entry
    for family in FAMILIES.values():
        MegatronModelBridge.register_bridge(
            source=family.architecture,
            target=GPTModel,
            provider=MLAModelProvider,
            model_type=family.model_type,
        )(_BRIDGES[family.model_type])
    use_pretrained_class()
    correct_direct_queries()
    correct_expert_adapters()
    # A Megatron checkpoint names the layer spec's function, and loading one checks whose it is.
    register_allowed_target_prefix("kimi_bridge.")
    _registered.update({(dispatcher, key): dispatcher._exact_types.get(key) for dispatcher, key in _before})


def unregister() -> None:
    """Takes back what `register` did: whatever held the name before this library holds it again."""
    for (dispatcher, key), entry in _before.items():
        if dispatcher._exact_types.get(key) is _registered.get((dispatcher, key)):
            dispatcher._exact_types.pop(key, None)
            if entry is not None:
                dispatcher.impl(key)(entry)
            dispatcher._dispatch_cache.clear()
    _before.clear()
    _registered.clear()
    use_upstreams_class()
    leave_direct_queries()
    undo_correction()


def _keys() -> list[Any]:
    return [key for f in FAMILIES.values() for key in (f.architecture, (f.architecture, GPTModel))]


# What Megatron-Bridge looks bridges up in, its entries before `register`, and those that it made.
_DISPATCHERS = (get_model_bridge, stream_weights_megatron_to_hf, stream_weights_megatron_to_hf_quant)
_before: dict[tuple[Any, Any], Any] = {}
_registered: dict[tuple[Any, Any], Any] = {}


def is_registered() -> bool:
    """Whether this library's bridges handle their architectures in this process now."""
    return next(_others(), None) is None


def assert_registered() -> None:
    """For workers to call before they build a model.

    Raises:
        KimiBridgeError: another bridge has taken an architecture's name since the import.
    """
    for architecture, bridge in _others():
        raise KimiBridgeError(
            f"{architecture} is handled by {type(bridge).__module__}.{type(bridge).__qualname__}, registered"
            " after kimi_bridge.megatron: call kimi_bridge.megatron.register() once more."
        )


def _others() -> Iterator[tuple[str, Any]]:
    """Architectures that other bridges handle, and those bridges."""
    for family in FAMILIES.values():
        bridge = get_model_bridge(family.architecture)
        if type(bridge) is not _BRIDGES[family.model_type]:
            yield family.architecture, bridge


def ensure_text_only(hf_config: Any, language_model_only: bool = False) -> None:
    """Refuses a full-VLM training request for a Kimi K2.5 or Kimi-VL config.

    Args:
        hf_config: the checkpoint's config.
        language_model_only: whether the caller asks for the language model alone.

    Raises:
        KimiBridgeError: the config has a vision tower and the caller wants it trained.
    """
    if not language_model_only and getattr(hf_config, "vision_config", None) is not None:
        raise KimiBridgeError(_TEXT_ONLY)


def _refuse_vision(name: str) -> None:
    if name.removeprefix("module.").startswith(VISION_PREFIXES):
        raise KimiBridgeError(f"{name} is a vision parameter. {_TEXT_ONLY}")


def _check_coverage(bridge: KimiK25TextBridge, models: list[Any], source: KimiStateSource | None) -> None:
    """Every parameter has its weights and every text weight its parameter, over all ranks.

    The names of this pipeline's parameters, with each expert's number replaced by all of them, are the
    names of the whole model: so each rank decides alone, and all decide alike.
    """
    registry = bridge.mapping_registry()
    config = transfer.unwrap(models)[0].config
    num_experts = config.num_moe_experts or 0
    expected: dict[str, str] = {}
    unmapped = []
    for name in _one_expert_each(bridge._megatron_global_param_names_all_pp_ranks(models)):
        mapping = registry.megatron_to_hf_lookup(bridge._get_lora_unwrapped_name(name))
        if mapping is None:
            unmapped.append(name)
            continue
        weights = [mapping.hf_param] if isinstance(mapping.hf_param, str) else mapping.hf_param.values()
        for weight in weights:
            expected.update((each, name) for each in _all_experts(weight, num_experts))
    if unmapped:
        fault = (
            f"{_some(unmapped)}: no mapping to a checkpoint weight. The model has parameters that no Kimi"
            " checkpoint has (a bias, another layer type?): build it from to_megatron_provider() unchanged."
        )
        raise on_every_rank(CheckpointError(fault))
    if source is not None:
        _check_names(source, expected, tied=config.share_embeddings_and_output_weights)


def _check_names(source: KimiStateSource, expected: dict[str, str], tied: bool) -> None:
    present = set(source.get_all_keys())
    if tied:
        expected = {name: param for name, param in expected.items() if not name.endswith("lm_head.weight")}
        if f"{TEXT_PREFIX}lm_head.weight" in present:
            fault = (
                f"{TEXT_PREFIX}lm_head.weight: in {source.path}, whose config.json ties it to the embedding."
                " Set tie_word_embeddings to false there to train it, or take the weight out."
            )
            raise on_every_rank(CheckpointError(fault))
    missing = [name for name in expected if name not in present]
    if missing:
        fault = (
            f"{_some(missing)}: missing from {source.path}, needed for {expected[missing[0]]}. Download the"
            " checkpoint again, or check that the model has the checkpoint's layers, experts and MTP layers."
        )
        raise on_every_rank(CheckpointError(fault))
    others = tuple(family.projector for family in FAMILIES.values() if family is not source.reader.family)
    unused = [
        name
        for name in sorted(present)
        if name not in expected and (not is_carried(name) or name.startswith(others))
    ]
    if unused:
        fault = (
            f"{_some(unused)}: in {source.path}, but the model has no parameter for it. The checkpoint is of"
            " another model, or the provider was changed (num_layers?): truncate with `kimi-bridge truncate`."
        )
        raise on_every_rank(CheckpointError(fault))


_EXPERT = re.compile(r"(\.experts\.(?:local_experts\.|linear_fc\d\.(?:to_wrap\.)?weight))(\d+)")


def _one_expert_each(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(_EXPERT.sub(r"\g<1>0", name) for name in names))


def _all_experts(weight: str, num_experts: int) -> list[str]:
    if ".mlp.experts.0." not in weight:
        return [weight]
    before, after = weight.split(".mlp.experts.0.")
    return [f"{before}.mlp.experts.{expert}.{after}" for expert in range(num_experts)]


def _some(names: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
