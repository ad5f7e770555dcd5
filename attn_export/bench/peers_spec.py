"""The layer of a spec in PyTorch: eager, with a static cache, compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attn_export.attention import Attention
from attn_export.attention.quantised_cache import Past
from attn_export.bench.feeds import Feed, Prepared, feeds_of
from attn_export.bench.peers_plain import prepare_torch, ready, tensor, tensors
from attn_export.spec import AttentionSpec


class StaticCache(Attention):
    """`Attention` for one new token with a cache of fixed capacity, which is written in place."""

    def set_cache(self, keys: Tensor, values: Tensor, past_len: int) -> None:
        """Set the tensors of the cache, as plain attributes.

        Args:
            keys: `[B, Hkv, capacity, D]`.
            values: `[B, Hkv, capacity, Dv]`.
            past_len: The number of tokens in the cache.
        """
        self.keys, self.values = keys, values
        self.positions = torch.tensor([past_len], device=keys.device)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
        past: Past,  # noqa: ARG002 (the past is in the cache already)
        past_length: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        self.keys.index_copy_(2, self.positions, k)
        self.values.index_copy_(2, self.positions, v)
        return super()._attend(q, self.keys, self.values, mask, (None, None), past_length)


def make_layer(
    options: Mapping[str, Any],
    threads: int,
    change: Callable[[Attention], object] = lambda _: None,
) -> Prepared:
    """Return a spec's module that is ready to run.

    Args:
        options: ``spec``, its fields; ``sizes`` of its axes; ``static``, whether to use
            `StaticCache`; ``compile``, whether to use torch.compile.
        threads: Threads for computing.
        change: Called with the module, which it changes in place.

    Raises:
        SpecError: If the fields are no valid spec.
    """
    prepare_torch(threads)
    spec = AttentionSpec.from_dict(options["spec"])
    module, inputs = layer(spec, options["sizes"], static=options["static"])
    change(module)
    return ready(module, inputs, compiled=options["compile"])


def layer(
    spec: AttentionSpec, sizes: Mapping[str, int], *, static: bool, device: str = "cpu"
) -> tuple[Attention, dict[str, Tensor]]:
    """Return a spec's module and its inputs by name.

    Args:
        spec: The spec, with an appending cache or none.
        sizes: The sizes of its axes, by name.
        static: Whether the module is a `StaticCache`.
        device: The device of the module and the inputs.
    """
    if static:
        # One new token attends to all keys. PyTorch is faster without a causal mask.
        spec = dataclasses.replace(spec, causal=False)
    module = (StaticCache if static else Attention)(spec).eval().to(device)
    on_host = tensors(feeds_of(spec.inputs(), sizes))
    inputs = {name: value.to(device) for name, value in on_host.items()}
    if isinstance(module, StaticCache):
        past = inputs["past_key"], inputs["past_value"]
        keys, values = (tensor(_extended_cache(x), seed).to(device) for seed, x in enumerate(past))
        module.set_cache(keys, values, sizes["past_len"])
        # The module reads only the length of these inputs, not their elements.
        inputs["past_key"], inputs["past_value"] = (
            buffer[:, :, : sizes["past_len"]] for buffer in (keys, values)
        )
    return module, inputs


def _extended_cache(past: Tensor) -> Feed:
    """Return the feed of a cache with one token more than `past`."""
    B, Hkv, P, D = past.shape
    return Feed((B, Hkv, P + 1, D), str(past.dtype).removeprefix("torch."))
