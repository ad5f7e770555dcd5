"""The layer of a spec in PyTorch: as it is, with a static cache, compiled, quantised by torchao."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.bench.feeds import Feed, Prepared, feeds_of
from attn_export.bench.peers_plain import prepare_torch, ready, tensor
from attn_export.spec import AttentionSpec

TORCHAO: Mapping[str, tuple[str, str, Mapping[str, object]]] = {
    "int8 weights": ("torchao.quantization", "Int8WeightOnlyConfig", {}),
    "dynamic int8": ("torchao.quantization", "Int8DynamicActivationInt8WeightConfig", {}),
    "int4 weights": (
        "torchao.prototype.quantization.int4", "PrototypeInt4WeightOnlyConfig", {"group_size": 32},
    ),
}  # fmt: skip
"""The module, name and options of each configuration; of int4 there is only a prototype on CPUs."""


class StaticCache(Attention):
    """`Attention` for one new token, its keys and values written in place."""

    def hold(self, keys: Tensor, values: Tensor, past_len: int) -> None:
        """Use these as the cache, of which so many rows are filled.

        Args:
            keys: `[B, Hkv, capacity, D]`.
            values: `[B, Hkv, capacity, Dv]`.
            past_len: The number of filled rows.
        """
        self.keys, self.values = keys, values
        self.place = torch.tensor([past_len], device=keys.device)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        past_key: Tensor | None,  # noqa: ARG002 (the past is in the cache already)
        past_value: Tensor | None,  # noqa: ARG002
        past_length: Tensor | None,
    ) -> list[Tensor]:
        self.keys.index_copy_(2, self.place, k)
        self.values.index_copy_(2, self.place, v)
        return super()._attend(q, self.keys, self.values, attn_mask, None, None, past_length)


def make_layer(options: Mapping[str, Any], threads: int) -> Prepared:
    """Return a spec's module ready to run.

    Args:
        options: ``spec``; ``sizes`` of its axes; ``static``; ``compile``; ``torchao``, a key of
            `TORCHAO`, if its linear layers are to be quantised.
        threads: Threads for computing.

    Raises:
        SpecError: If the spec cannot be expressed in this form.
    """
    prepare_torch(threads)
    spec = AttentionSpec.from_dict(options["spec"])
    module, inputs = layer(spec, options["sizes"], static=options["static"])
    if "torchao" in options:
        quantise(module, options["torchao"])
    return ready(module, inputs, compiled=options["compile"])


def layer(
    spec: AttentionSpec, sizes: Mapping[str, int], *, static: bool, device: str = "cpu"
) -> tuple[Attention, dict[str, Tensor]]:
    """Return a spec's module, and inputs by name.

    Args:
        spec: The spec, with an appending cache or none.
        sizes: The sizes of its axes.
        static: Whether it decodes in a `StaticCache`.
        device: The device.
    """
    if static:
        # One new token sees everything: without a causal mask PyTorch is faster.
        spec = dataclasses.replace(spec, causal=False)
    module = (StaticCache if static else Attention)(spec).eval().to(device)
    feeds = feeds_of(spec.inputs(), sizes)
    inputs = {name: tensor(feed, n).to(device) for n, (name, feed) in enumerate(feeds.items())}
    if isinstance(module, StaticCache):
        past = inputs["past_key"], inputs["past_value"]
        keys, values = (tensor(_longer(x), seed).to(device) for seed, x in enumerate(past))
        module.hold(keys, values, sizes["past_len"])
        # The past is there for its length; its rows are never read.
        inputs["past_key"], inputs["past_value"] = (
            buffer[:, :, : sizes["past_len"]] for buffer in (keys, values)
        )
    return module, inputs


def quantise(module: nn.Module, name: str) -> None:
    """Quantise the linear layers of a module by torchao, in place.

    Args:
        module: The module.
        name: A key of `TORCHAO`.
    """
    place, config, options = TORCHAO[name]
    # Installed where it takes part only.
    made = getattr(importlib.import_module(place), config)(**options)
    importlib.import_module("torchao.quantization").quantize_(module, made)


def _longer(past: Tensor) -> Feed:
    B, Hkv, P, D = past.shape
    return Feed((B, Hkv, P + 1, D), str(past.dtype).removeprefix("torch."))
