"""Candidates that run the layer of a spec in PyTorch with weights quantised by torchao."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from attn_export.parts.benchmarks.feeds import Prepared
from attn_export.parts.benchmarks.torch_layers import make_layer

KIND = "measuring.torchao_peer:make_quantised_layer"
"""The kind of these candidates."""

TORCHAO: Mapping[str, tuple[str, str, Mapping[str, object]]] = {
    "int8 weights": ("torchao.quantization", "Int8WeightOnlyConfig", {}),
    "dynamic int8": ("torchao.quantization", "Int8DynamicActivationInt8WeightConfig", {}),
    "int4 weights": (
        "torchao.prototype.quantization.int4", "PrototypeInt4WeightOnlyConfig", {"group_size": 32},
    ),
}  # fmt: skip
"""Module, class and options of each torchao configuration. On CPUs int4 is only a prototype."""


def make_quantised_layer(options: Mapping[str, Any], threads: int) -> Prepared:
    """Return a compiled and quantised module of a spec that is ready to run.

    Args:
        options: ``spec``, its fields; ``sizes`` of its axes; ``static``, whether to use
            a cache of fixed capacity; ``torchao``, the key of `TORCHAO` by which to quantise it.
        threads: Threads for computing.

    Raises:
        SpecError: If the fields are no valid spec.
    """
    change = functools.partial(quantise, name=options["torchao"])
    return make_layer({**options, "compile": True}, threads, change)


def quantise(module: nn.Module, name: str) -> None:
    """Quantise the linear layers of a module by torchao, in place.

    Args:
        module: The module.
        name: A key of `TORCHAO`.
    """
    module_name, class_name, options = TORCHAO[name]
    config = getattr(importlib.import_module(module_name), class_name)(**options)
    importlib.import_module("torchao.quantization").quantize_(module, config)
