"""Parts of benchmarks that need torch: layers and rooflines in PyTorch, and bare exports.

"Bare" graphs are the unchanged results of `torch.onnx.export(dynamo=True)` with default options.
Each candidate and each export has a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.attention.functional import Past
from attn_export.parts.benchmarks.feeds import Feed, Prepared, feeds_of, filled
from attn_export.spec import AttentionSpec

# -- modules in PyTorch as candidates -----------------------------------------------------------


def prepare_torch(threads: int) -> None:
    """Set the number of threads, and compute float32 products in full precision."""
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")


def tensor(feed: Feed, seed: int) -> Tensor:
    """Return a tensor of a feed's shape and dtype, aligned as that of other candidates."""
    array = filled(feed, seed)
    if feed.dtype == "bfloat16":
        return torch.from_numpy(array.view("uint16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def tensors(feeds: Mapping[str, Feed]) -> dict[str, Tensor]:
    """Return the tensors of feeds by name, with the position of each as its seed."""
    return {name: tensor(feed, seed) for seed, (name, feed) in enumerate(feeds.items())}


def ready(module: nn.Module, inputs: Mapping[str, Tensor], *, compiled: bool) -> Prepared:
    """Return a module and its inputs as a candidate that is ready to run."""
    call: Callable[..., object] = torch.compile(module, dynamic=False) if compiled else module

    def run() -> object:
        with torch.inference_mode():
            return call(**inputs)

    if compiled:
        run()  # the first call compiles, which must not be measured
    return Prepared(run, {"threads": torch.get_num_threads(), "precision": "highest"})


def make_roofline(options: Mapping[str, Any], threads: int) -> Prepared:
    """Return a matrix product, or a sum over a buffer, as a candidate that is ready to run.

    `options`: ``gemm``, the sizes [M, K, N] of a product; or ``read``, a number of float32s.
    """
    prepare_torch(threads)
    if "gemm" in options:
        M, K, N = options["gemm"]
        a, b = tensor(Feed((M, K)), 0), tensor(Feed((K, N)), 1)
        out = torch.empty(M, N)
        return Prepared(lambda: torch.mm(a, b, out=out))
    numbers = tensor(Feed((options["read"],)), 0)
    return Prepared(numbers.sum)


# -- the layer of a spec: eager, with a static cache, compiled ------------------------------------


class _StaticCache(Attention):
    """`Attention` for one new token with a cache of fixed capacity, which is written in place."""

    def set_cache(self, keys: Tensor, values: Tensor, past_len: int) -> None:
        """Set the tensors of the cache, `[B, Hkv, capacity, D]`, as plain attributes."""
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

    `options`: ``spec``, its fields; ``sizes`` of its axes; ``static``, whether to use a cache of
    fixed capacity; ``compile``, whether to use torch.compile.
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

    `static`: Whether the module has a cache of fixed capacity. It needs an appending cache in the
    spec, and a query_len of 1.
    """
    if static:
        # One new token attends to all keys. PyTorch is faster without a causal mask.
        spec = dataclasses.replace(spec, causal=False)
    module = (_StaticCache if static else Attention)(spec).eval().to(device)
    on_host = tensors(feeds_of(spec.inputs(), sizes))
    inputs = {name: value.to(device) for name, value in on_host.items()}
    if isinstance(module, _StaticCache):
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


# -- bare exports -------------------------------------------------------------------------------

_DynamicAxes = Mapping[str, Mapping[int, str]]
"""The names of the dynamic axes of each input, by the number of the axis."""

_EXAMPLE = {
    "batch": 2, "query_len": 5, "past_len": 7, "total_len": 12, "key_len": 6, "capacity": 12
}  # fmt: skip
"""Sizes of the example inputs of an export; the axes stay dynamic."""


def bare_spec(spec: Mapping[str, Any], file: str) -> None:
    """Export the `Attention` of a spec by `torch.onnx.export` alone."""
    layer_spec = AttentionSpec.from_dict(spec)
    module, (inputs, axes) = Attention(layer_spec).eval(), example_of(layer_spec)
    save_bare(module, inputs, axes, list(layer_spec.output_shapes()), Path(file))


def example_of(spec: AttentionSpec) -> tuple[dict[str, Tensor], _DynamicAxes]:
    """Return example inputs of an export by name, and their dynamic axes."""
    inputs = tensors(feeds_of(spec.inputs(), _EXAMPLE))
    axes = {
        name: {axis: size for axis, size in enumerate(declared.shape) if isinstance(size, str)}
        for name, declared in spec.inputs().items()
    }
    return inputs, axes


def save_bare(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    axes: _DynamicAxes,
    names: list[str],
    file: Path,
) -> None:
    """Export a module by `torch.onnx.export` alone, and write the graph."""
    with suppress_warnings():
        program = export_bare(module, inputs, axes, names)
        # Renamed when complete, because other processes look whether the file exists.
        part = file.with_name(f"{file.stem}.part.onnx")
        program.save(str(part), external_data=False)
    part.replace(file)


def export_bare(
    module: nn.Module, inputs: Mapping[str, Tensor], axes: _DynamicAxes, names: list[str]
) -> Any:
    """Return the unchanged result of `torch.onnx.export` of a module."""
    return torch.onnx.export(
        module,
        (),
        kwargs=dict(inputs),
        dynamo=True,
        input_names=list(inputs),
        output_names=names,
        dynamic_shapes={name: dict(axes[name]) for name in inputs},
        verbose=False,
    )


@contextlib.contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppress log messages up to WARNING, and warnings, inside this block."""
    level = logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
