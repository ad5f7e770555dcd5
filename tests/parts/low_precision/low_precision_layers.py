"""Layers whose caches or activations have few bits, with the faults that are planted into each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import cache_faults as caches
from activation_faults import PRODUCTS, ROUNDINGS, Product, Rounding, run_products, run_roundings
from block_faults import OF_BLOCKS
from float16_faults import OF_FLOAT16
from quantised_layers import Layer, edited


def multiplied(spec: Mapping[str, Any], **options: Any) -> Layer:
    """Return a layer with a scale for each input of products."""
    planted = {
        (name, place): (cause, functools.partial(run_products, fault=fault, place=place))
        for name, (cause, fault) in PRODUCTS.items()
        for place in ("in", "v", "out")
    }
    right = functools.partial(run_products, fault=Product(), place="all")
    return Layer({**WEIGHTS8, **DYNAMIC, **spec}, right, planted, **options)


def rounded(spec: Mapping[str, Any], shared: str = "") -> Layer:
    """Return a layer with a scale for each block of inputs; several: of one alone none is wrong."""
    planted = {
        (name, place): (
            cause if place == "all" else None,
            functools.partial(run_roundings, fault=fault, place=place),
        )
        for name, (cause, fault) in ROUNDINGS.items()
        for place in ("in", "v", "out", "all")
    }
    fields = {
        "embed_dim": 64, "num_kv_heads": 4, "weights_dtype": "int4",
        "activations": "dynamic-int8-per-block", **spec,
    }  # fmt: skip
    right = functools.partial(run_roundings, fault=Rounding(), place="all")
    return Layer(fields, right, planted, shared, ("standard", "ort"))


# As many heads for keys, so that a weight may be read transposed.
SQUARE = {"num_kv_heads": 4}
IN_PLACE = {"cache": "in-place", "attn_mask": "none"}
INT8, INT4 = {**IN_PLACE, "kv_dtype": "int8"}, {**IN_PLACE, "kv_dtype": "int4"}
HALF = {**IN_PLACE, "kv_dtype": "float16"}
# As many heads as channels, so that scales may be transposed.
CHANNELS = {"kv_scale": "per-channel", "num_heads": 8, "num_kv_heads": 8, "head_dim": 8}
PLAIN = {"cache": "none", "attn_mask": "none", "bias": "none"}
WEIGHTS8 = {**SQUARE, "weights_dtype": "int8"}
DYNAMIC = {"activations": "dynamic-int8"}
ASYMMETRIC = {"scheme": "asymmetric"}
MIXED, TWICE = "cache of int8 beside products", "blocks and a cache of int8"

LAYERS = {
    "cache of float16": edited({**HALF, "rotary": "half"}, OF_FLOAT16, "float16-cache/grouped"),
    "wide cache of float16": edited({**HALF, "embed_dim": 128, "num_kv_heads": 4}, OF_FLOAT16),
    "cache per tensor": edited(
        {**INT8, "rotary": "half"}, caches.ANY | caches.OF_TENSORS, "quantised-cache/per tensor"),
    "cache by channel": edited({**INT8, **CHANNELS}, caches.ANY | caches.OF_CHANNELS),
    "packed cache": edited({**INT4, "rotary": "half"}, caches.OF_BYTES, "quantised-cache/int4"),
    "packed cache by channel": edited(
        {**INT4, **CHANNELS}, caches.OF_BYTES | caches.OF_CHANNELS),
    "cache by block": edited(
        {**INT4, "kv_scale": "per-block", "head_dim": 64, "rotary": "half"}, OF_BLOCKS,
        "quantised-cache/int4 by block"),
    "products": multiplied({"rotary": "half"}, shared="quantised-activations/cached"),
    # It is in no other test by default: here all its forms are judged.
    "products and a cache of int8": multiplied(INT8, dialects=("all",)),
    MIXED: edited(
        {**INT8, **DYNAMIC, "weights_dtype": "int8", "rotary": "half"},
        caches.ANY | caches.OF_TENSORS),
    "products alone": multiplied(PLAIN),
    "blocks": rounded({"rotary": "half"}, "block-activations/cached"),
    TWICE: rounded(INT8),
    "blocks alone": rounded({**PLAIN, **ASYMMETRIC, "block_size": 16}),
}  # fmt: skip
MORE = (MIXED, TWICE)
"""The layers that `--all` tries: each is of two that are tried by default."""
