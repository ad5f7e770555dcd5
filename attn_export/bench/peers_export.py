"""Exports of graphs for benchmarks, each of which runs in a process of its own.

"Bare" graphs are the unchanged results of `torch.onnx.export(dynamo=True)` with default options.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.bench.feeds import feeds_of
from attn_export.bench.peers_plain import tensors
from attn_export.spec import AttentionSpec

DynamicAxes = Mapping[str, Mapping[int, str]]
"""The names of the dynamic axes of each input, by the number of the axis."""

EXAMPLE = {
    "batch": 2, "query_len": 5, "past_len": 7, "total_len": 12, "key_len": 6, "capacity": 12
}  # fmt: skip
"""Sizes of the example inputs of an export; the axes stay dynamic."""


def bare_spec(spec: Mapping[str, Any], file: str) -> None:
    """Export the `Attention` of a spec by `torch.onnx.export` alone.

    Args:
        spec: The fields of the spec.
        file: The file to write.
    """
    layer = AttentionSpec.from_dict(spec)
    inputs, axes = example_of(layer)
    save_bare(Attention(layer).eval(), inputs, axes, list(layer.output_shapes()), Path(file))


def example_of(spec: AttentionSpec) -> tuple[dict[str, Tensor], DynamicAxes]:
    """Return example inputs of an export by name, and their dynamic axes."""
    inputs = tensors(feeds_of(spec.inputs(), EXAMPLE))
    axes = {
        name: {axis: size for axis, size in enumerate(declared.shape) if isinstance(size, str)}
        for name, declared in spec.inputs().items()
    }
    return inputs, axes


def save_bare(
    module: nn.Module, inputs: Mapping[str, Tensor], axes: DynamicAxes, names: list[str], file: Path
) -> None:
    """Export a module by `torch.onnx.export` alone, and write the graph.

    Args:
        module: The module.
        inputs: Its example inputs by name.
        axes: The dynamic axes of each input.
        names: The names of the outputs.
        file: The file to write.
    """
    with suppress_warnings():
        program = export_bare(module, inputs, axes, names)
        # Renamed when complete, because other processes look whether the file exists.
        part = file.with_name(f"{file.stem}.part.onnx")
        program.save(str(part), external_data=False)
    part.replace(file)


def export_bare(
    module: nn.Module, inputs: Mapping[str, Tensor], axes: DynamicAxes, names: list[str]
) -> Any:
    """Return the unchanged result of `torch.onnx.export` of a module.

    Args:
        module: The module.
        inputs: Its example inputs by name.
        axes: The dynamic axes of each input.
        names: The names of the outputs.
    """
    parameters = list(inputs)
    return torch.onnx.export(
        module,
        (),
        kwargs=dict(inputs),
        dynamo=True,
        input_names=parameters,
        output_names=names,
        dynamic_shapes={name: dict(axes[name]) for name in parameters},
        verbose=False,
    )


@contextlib.contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppress log messages up to WARNING, and warnings, inside this block."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)
