"""Faults in configs: one field is changed while the tensors stay."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

Config = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ConfigFault:
    """A kind of faults.

    Attributes:
        change: Returns the changed config; None where the kind does not apply.
        words: Words of which the sentence of the cause must hold one, in lower case.
    """

    name: str
    change: Callable[[Config], Config | None]
    words: tuple[str, ...]


def _set(config: Config, key: str, value: Any) -> Config | None:
    if config.get(key, "missing") == value or (value is None and config.get(key) is None):
        return None
    return {**config, key: value}


def _times(key: str, factor: float) -> Callable[[Config], Config | None]:
    def change(config: Config) -> Config | None:
        value = config.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return _set(config, key, type(value)(value * factor))

    return change


def _to(key: str, value: Any) -> Callable[[Config], Config | None]:
    return lambda config: _set(config, key, value) if key in config else None


def _plus(key: str, step: int) -> Callable[[Config], Config | None]:
    return lambda config: (
        _set(config, key, config[key] + step) if isinstance(config.get(key), int) else None
    )


def _rope(edit: Callable[[Config], Config | None], part: str = "") -> Any:
    """Return a change of rope_parameters, or of those of one type of layers."""

    def change(config: Config) -> Config | None:
        rope = copy.deepcopy(config.get("rope_parameters"))
        if not rope or ((part or "full_attention") in rope and not part):
            return None
        old = rope.get(part) if part else rope
        new = edit(old) if old else None
        if new is None or new == old:
            return None
        return {**config, "rope_parameters": {**rope, part: new} if part else new}

    return change


def _exchanged_bases(config: Config) -> Config | None:
    rope = config.get("rope_parameters") or {}
    if "sliding_attention" not in rope:
        return None
    turned = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
    return {**config, "rope_parameters": {a: rope[b] for a, b in turned.items()}}


def _layer_types(change: Callable[[list[str]], list[str]]) -> Any:
    return lambda config: (
        _set(config, "layer_types", change(config["layer_types"]))
        if config.get("sliding_window") and config.get("layer_types") else None
    )  # fmt: skip


def _activation(value: str) -> Callable[[Config], Config | None]:
    def change(config: Config) -> Config | None:
        same = {"gelu_new", "gelu_pytorch_tanh"}
        for key in ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn"):
            if key in config and {config[key], value} != same:
                return _set(config, key, value)
        return None

    return change


def _first(*changes: Callable[[Config], Config | None]) -> Callable[[Config], Config | None]:
    return lambda config: next((x for c in changes if (x := c(config)) is not None), None)


def _eps(factor: float) -> Callable[[Config], Config | None]:
    keys = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
    return _first(*(_times(key, factor) for key in keys))


def _config_faults() -> Iterator[ConfigFault]:
    act = ("activation", "hidden_act", "dense_act_fn", "silu", "gelu", "relu")
    for name in ("silu", "gelu", "gelu_pytorch_tanh", "relu", "quick_gelu"):
        yield ConfigFault(f"activation {name}", _activation(name), act)
    for factor in (0.1, 10, 100, 1e4):
        yield ConfigFault(f"eps times {factor:g}", _eps(factor), ("eps",))
    base = ("rope_theta", "base", "theta")
    for factor in (0.1, 2, 10):
        yield ConfigFault(f"base times {factor}", _rope(_times("rope_theta", factor)), base)
    for part in ("full_attention", "sliding_attention"):
        yield ConfigFault(f"base of {part}", _rope(_times("rope_theta", 10), part), base)
    yield ConfigFault("bases exchanged", _exchanged_bases, (*base, "rope"))
    rope = ("rope", "rotary", "frequenc", "factor", "scaling")
    default = {"rope_type": "default"}
    yield ConfigFault(
        "no rope scaling",
        _rope(lambda r: {**default, "rope_theta": r["rope_theta"]} if "factor" in r else None),
        rope,
    )  # fmt: skip
    yield ConfigFault(
        "linear rope scaling",
        _rope(lambda r: {**r, "rope_type": "linear", "factor": r.get("factor", 2.0)}), rope,
    )  # fmt: skip
    for key in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        yield ConfigFault(f"rope {key}", _rope(_times(key, 1.5)), (*rope, key))
    yield ConfigFault("rope truncate", _rope(_to("truncate", True)), (*rope, "truncate"))
    original = "original_max_position_embeddings"
    yield ConfigFault("rope original length", _rope(_times(original, 2)), (*rope, "original"))
    yield ConfigFault(
        "rotary of half the head", _rope(lambda r: {**r, "partial_rotary_factor": 0.5}),
        (*rope, "partial"),
    )  # fmt: skip
    window = ("window", "sliding", "layer_types")
    for step in (-1, 1, 8):
        yield ConfigFault(f"window {step:+}", _plus("sliding_window", step), window)
    yield ConfigFault(
        "no window",
        _first(_layer_types(lambda t: ["full_attention"] * len(t)), _to("sliding_window", None)),
        window,
    )  # fmt: skip
    yield ConfigFault(
        "a window", lambda c: _set(c, "sliding_window", 8) if not c.get("sliding_window") else None,
        window,
    )  # fmt: skip
    yield ConfigFault("layer types exchanged", _layer_types(lambda t: t[::-1]), window)
    yield ConfigFault(
        "window everywhere", _layer_types(lambda t: ["sliding_attention"] * len(t)), window
    )
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        cap = ("softcap", "cap")
        yield ConfigFault(f"no {key}", _to(key, None), cap)
        yield ConfigFault(f"{key} times 1.2", _times(key, 1.2), cap)
        yield ConfigFault(f"{key} of 5", _to(key, 5.0), cap)
    scale = ("scale", "query_pre_attn_scalar", "scaling")
    yield ConfigFault("query_pre_attn_scalar", _times("query_pre_attn_scalar", 2 / 3), scale)
    for key in (
        "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling",
    ):  # fmt: skip
        words = (key, key.split("_")[0], "scale")
        yield ConfigFault(f"{key} times 1.01", _times(key, 1.01), words)
        yield ConfigFault(f"{key} of 1", _to(key, 1.0), words)
    inverse = "scale_attn_by_inverse_layer_idx"
    yield ConfigFault("scale_attn_weights", _to("scale_attn_weights", False), scale)
    yield ConfigFault(inverse, _to(inverse, True), (*scale, "inverse"))
    experts = ("expert", "top_k")
    yield ConfigFault("an expert less", _plus("num_experts_per_tok", -1), experts)
    yield ConfigFault("an expert more", _plus("num_experts_per_tok", 1), experts)
    yield ConfigFault("swiglu_limit", _to("swiglu_limit", 0.5), ("limit", "clamp"))
    yield ConfigFault(
        "use_parallel_residual", _to("use_parallel_residual", False), ("parallel", "residual")
    )
    yield ConfigFault(
        "heads of another size",
        lambda c: None if "head_dim" in c else _times("num_attention_heads", 0.5)(c), ("head",),
    )  # fmt: skip
    both = "use_bidirectional_attention"
    yield ConfigFault("causal", _to("is_decoder", True), ("causal", "is_decoder"))
    yield ConfigFault("not causal", _to(both, True), ("causal", "bidirectional"))
    buckets = "relative_attention_max_distance"
    yield ConfigFault(buckets, _times(buckets, 0.5), ("distance", "bucket"))
    yield ConfigFault("scale_embedding", _to("scale_embedding", True), ("embed", "scale"))
    yield ConfigFault(
        "scale_decoder_outputs", _to("scale_decoder_outputs", False), ("scale", "tie", "logits")
    )


CONFIG_FAULTS = tuple(_config_faults())
