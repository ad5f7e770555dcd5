"""What the layers of a model of transformers keep from step to step."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from attn_export.errors import ExportError, first_few


def cache_name(model: Any) -> str:
    """Return the argument that takes the cache, which outputs have too; "" without one.

    It is ``cache`` from transformers 5.24 on.
    """
    taken = inspect.signature(type(model).forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in taken), "")


def cache_shapes(model: Any) -> dict[tuple[int, str], tuple[tuple[int, int], tuple[int, int]]]:
    """Return the number of heads and the size of keys and of values, by layer and whose they are.

    Configs do not hold them for every model, so it runs.
    """
    if "attn_export_caches" not in vars(model):
        _refuse_other_caches(model)
        ids = torch.zeros(1, 2, dtype=torch.int64)
        kwargs: dict[str, Any] = {"input_ids": ids}
        if model.config.is_encoder_decoder:
            kwargs["decoder_input_ids"] = ids
            name = model.main_input_name
            if name != "input_ids":
                kwargs[name] = features_of(model, name)
                del kwargs["input_ids"]
        if "input_ids" in kwargs:
            kwargs["attention_mask"] = torch.ones_like(ids)
        try:
            with torch.no_grad():
                cache = getattr(model(**kwargs, use_cache=True), cache_name(model))
        except Exception as error:  # as various as the models
            raise ExportError(
                f"{model.config.model_type} does not run on two tokens and gives no cache; models "
                "that need more are not supported"
            ) from error
        if cache is None:
            why = "" if getattr(model.config, "is_decoder", True) else ": is_decoder is false"
            raise ExportError(f"{model.config.model_type} keeps no keys and values{why}")
        # Some decoders without an encoder have room for its keys.
        parts = {"decoder": getattr(cache, "self_attention_cache", cache)}
        if model.config.is_encoder_decoder:
            parts = {"decoder": cache.self_attention_cache, "encoder": cache.cross_attention_cache}
        model.attn_export_caches = {
            (number, of): tuple((x.shape[1], x.shape[3]) for x in (layer.keys, layer.values))
            for of, each in parts.items()
            for number, layer in enumerate(each.layers)
            if layer.is_initialized
        }
    found: dict[tuple[int, str], Any] = model.attn_export_caches
    return found


def _refuse_other_caches(model: Any) -> None:
    """Refuse a model whose layers keep something else than keys and values, by what they hold."""
    config, keeps = model.config, bool(cache_name(model))
    kinds = {type(layer) for layer in DynamicCache(config=config).layers} if keeps else set()
    found = sorted({_state_of(x) for x in model.modules()} - {""})
    if any(issubclass(kind, LinearAttentionCacheLayerMixin) for kind in kinds) or (
        found and not keeps
    ):
        found = found or ["recurrent layers"]
        raise ExportError(f"{config.model_type} has {first_few(found)}, which are not supported")
    if not keeps:
        raise ExportError(f"{config.model_type} keeps no keys and values from step to step")
    others = sorted(x.__name__ for x in kinds - {DynamicLayer, DynamicSlidingWindowLayer})
    if others:
        raise ExportError(
            f"{config.model_type} has caches of more than keys and values ({first_few(others)}), "
            "which are not supported"
        )


def _state_of(module: nn.Module) -> str:
    """Return what a layer with a state is; "" if it has none."""
    own = dict(module.named_parameters(recurse=False))
    convolves = any(isinstance(x, nn.Conv1d) and x.groups > 1 for x in module.children())
    if "A_log" in own:
        what = "state-space" if "D" in own else "linear-attention"
    elif any("recurrent" in name or "time_decay" in name for name in own):
        what = "recurrent"
    elif convolves:
        what = "convolution"
    else:
        return ""
    return f"{what} layers ({type(module).__name__})"


def features_of(model: Any, name: str) -> torch.Tensor:
    """Return an input of zeros for a model that takes no tokens."""
    config = model.config
    if (
        name == "input_features"
        and not {"num_mel_bins", "max_source_positions"} <= vars(config).keys()
    ):
        raise ExportError(f"{config.model_type} takes {name}, whose sizes are not known")
    if name == "input_features":
        return torch.zeros(
            1, config.num_mel_bins, 2 * config.max_source_positions, dtype=model.dtype
        )
    raise ExportError(f"models that take {name} and have a decoder are not supported")


def step_limit(model: Any) -> tuple[int, str] | None:
    """Return how many tokens a decode may have before all keys change, and why; None if any.

    Some rotary angles depend on the length of the whole sequence: beyond a length transformers
    computes the keys that its cache holds anew, or new keys no longer fit them.
    """
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind == "longrope":
                rope = module.config.rope_parameters
                name = "original_max_position_embeddings"
                found.append((int((rope if layer is None else rope[layer])[name]), kind))
            elif isinstance(kind, str) and "dynamic" in kind:
                found.append((int(module.original_max_seq_len), kind))
    return min(found, default=None)
