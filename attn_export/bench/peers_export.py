"""Program that exports a graph, or times a lowering: `python -m … bench.peers_export JOB FILE`.

JOB is a JSON object. Its ``what`` is ``"bare"`` (with ``dims``), ``"bare spec"`` or ``"canonical"``
(with ``spec``), which write an ONNX file, or ``"times"`` (with ``spec``, ``dialect`` and
``rounds``), which writes JSON. "Bare" graphs are the unchanged results of
`torch.onnx.export(dynamo=True)` with default options.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.bench.dims import Dims
from attn_export.bench.feeds import feeds_of
from attn_export.bench.peers_plain import PlainAttention, tensors
from attn_export.spec import AttentionSpec

DynamicAxes = Mapping[str, Mapping[int, str]]
"""The names of the dynamic axes of each input, by the number of the axis."""

EXAMPLE = {
    "batch": 2, "query_len": 5, "past_len": 7, "total_len": 12, "key_len": 6, "capacity": 12
}  # fmt: skip
"""Sizes of the example inputs of an export; the axes stay dynamic."""


def bare_plain(dims: Dims, file: Path) -> None:
    """Export `PlainAttention` by `torch.onnx.export` alone.

    Args:
        dims: Sizes of the attention.
        file: The file to write.
    """
    example = dataclasses.replace(dims, batch=2, query_len=5, key_len=5)
    if dims.past_len:
        # For decoding, users would export plain code with an example of one new token.
        example = dataclasses.replace(dims, batch=2, query_len=1, key_len=8)
    inputs = tensors(example.inputs(in_place=False))
    axes: dict[str, dict[int, str]] = {}
    for name in inputs:
        if name.startswith("past_"):
            axes[name] = {0: "batch", 2: "past_len"}
        elif dims.past_len:  # a decoding step always has one new token
            axes[name] = {0: "batch"}
        else:
            axes[name] = {0: "batch", 1: "query_len"}
    names = list(dims.outputs())
    _bare(PlainAttention(dims).eval(), inputs, axes, names, file)


def bare_spec(spec: AttentionSpec, file: Path) -> None:
    """Export the `Attention` of a spec by `torch.onnx.export` alone.

    Args:
        spec: The layer.
        file: The file to write.
    """
    inputs, axes = _example(spec)
    _bare(Attention(spec).eval(), inputs, axes, list(spec.output_shapes()), file)


def canonical(spec: AttentionSpec, file: Path) -> None:
    """Export a spec to its canonical graph, as `attn-export build` does.

    Args:
        spec: The layer.
        file: The file to write.
    """
    from attn_export.export.export import export
    from attn_export.export.subject import Subject
    from attn_export.graph.save import save_graph

    save_graph(export(Subject.from_spec(spec)).model, file)


def dialect_times(spec: AttentionSpec, dialect: str, rounds: int) -> dict[str, list[float]]:
    """Measure the lowering to a dialect and, for comparison, a `torch.onnx.export`.

    Lowering and export alternate. The first run of each is not counted.

    Args:
        spec: The layer to export.
        dialect: The dialect to lower to.
        rounds: The number of measurements of each.

    Returns:
        Seconds of every run, for ``"lower"`` and for ``"torch.onnx.export"``.
    """
    from attn_export.export.export import export
    from attn_export.export.subject import Subject
    from attn_export.graph.lower import lower

    model = export(Subject.from_spec(spec)).model
    module, (inputs, axes) = Attention(spec).eval(), _example(spec)
    names = list(spec.output_shapes())
    calls: dict[str, Callable[[], object]] = {
        "lower": lambda: lower(model, dialect),
        "torch.onnx.export": lambda: _program(module, inputs, axes, names),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with _suppress_warnings():
        for number in range(rounds + 1):
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                if number:
                    seconds[name].append(time.perf_counter() - started)
    return seconds


def _example(spec: AttentionSpec) -> tuple[dict[str, Tensor], DynamicAxes]:
    inputs = tensors(feeds_of(spec.inputs(), EXAMPLE))
    axes = {
        name: {axis: size for axis, size in enumerate(declared.shape) if isinstance(size, str)}
        for name, declared in spec.inputs().items()
    }
    return inputs, axes


def _bare(
    module: nn.Module, inputs: Mapping[str, Tensor], axes: DynamicAxes, names: list[str], file: Path
) -> None:
    with _suppress_warnings():
        program = _program(module, inputs, axes, names)
        # Renamed when complete, because other processes look whether the file exists.
        part = file.with_name(f"{file.stem}.part.onnx")
        program.save(str(part), external_data=False)
    part.replace(file)


def _program(
    module: nn.Module, inputs: Mapping[str, Tensor], axes: DynamicAxes, names: list[str]
) -> Any:
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
def _suppress_warnings() -> Iterator[None]:
    """Suppress log messages up to WARNING, and warnings, inside this block."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def main() -> None:
    """Run the job of the command line and write its file."""
    job, file = json.loads(sys.argv[1]), Path(sys.argv[2])
    if job["what"] == "bare":
        bare_plain(Dims(**job["dims"]), file)
        return
    spec = AttentionSpec.from_dict(job["spec"])
    if job["what"] == "bare spec":
        bare_spec(spec, file)
    elif job["what"] == "canonical":
        canonical(spec, file)
    else:
        file.write_text(json.dumps(dialect_times(spec, job["dialect"], job["rounds"])))


if __name__ == "__main__":
    main()
