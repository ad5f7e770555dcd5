"""Quantised layers, the faults that are planted into each, and what the judge says of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from conftest import small_spec
from named_causes import first_cause_of
from planted_faults import Faults, Run, run_with
from shared import once

from attn_export import build
from attn_export.bundle.golden import read_golden, read_inputs, stored_cases
from attn_export.bundle.manifest import GOLDEN
from attn_export.graph.load import load_model
from attn_export.judge.judge import judge
from attn_export.results import Golden, StoredCase

Place = tuple[str, str]
"""The name of a fault, and the products in which it is planted; "" if they have names of theirs."""
Computed = Callable[[onnx.ModelProto], Run]
"""Returns what computes a graph, with a fault or without one."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A quantised layer.

    Attributes:
        spec: The fields of its spec beside those of `small_spec`.
        right: What computes its graph without a fault.
    """

    spec: Mapping[str, Any]
    right: Computed
    faults: Mapping[Place, tuple[str | None, Computed]]
    dialects: tuple[str, ...] = ("standard",)


def edited(spec: Mapping[str, Any], faults: Faults) -> Layer:
    """Return a layer whose faults are changes of its graph."""
    planted = {
        (name, ""): (cause, functools.partial(run_with, edit))
        for name, (cause, edit) in faults.items()
    }
    return Layer(spec, functools.partial(run_with, None), planted)


def bundle_of(name: str, layer: Layer) -> Path:
    spec = small_spec(**layer.spec)

    def make(folder: Path) -> None:
        built = build(
            spec, folder, name="few bits", runtimes=["ort-cpu"], dialects=[*layer.dialects]
        )
        assert built.passed, str(built)

    return once(f"quantised-layers/{name.replace(' ', '-')}", make)


CASES = ("base", "changed_past_key", "decode_300")
LOUD = ("outliers", "large_logits", "sharp")
"""The first case of each of these contents is tried as well: only large values are clipped."""


def chosen(cases: Sequence[StoredCase]) -> list[StoredCase]:
    """Return the cases that are judged, small ones first."""
    shapes = [case for case in cases if case.kind == "shape"]
    loud = (next(c for c in cases if c.name.startswith(content)) for content in LOUD)
    found = (*cases[:3], *shapes[:5], *(c for c in cases if c.name in CASES), *loud)
    sizes = {case.name: math.prod(max(n, 1) for n in case.sizes.values()) for case in found}
    return sorted({c.name: c for c in found}.values(), key=lambda case: sizes[case.name])


def refused_outputs(folder: Path, run: Run) -> int:
    """Return the number of refused outputs of the first case of which any is refused."""
    names, cases = stored_cases(folder / GOLDEN)
    for case in chosen(cases):
        golden = goldens_of(folder)[case.name]
        outputs = {
            name: array.astype(golden.expected[name].dtype)
            for name, array in run(read_inputs(case, names)).items()
        }
        verdicts = judge("planted", "model.onnx", golden, outputs)
        refused = sum(verdict.status != "passed" for verdict in verdicts)
        if refused:
            return refused
    return 0


@functools.lru_cache(maxsize=2)
def goldens_of(folder: Path) -> dict[str, Golden]:
    """Return the reference of the cases of a bundle, by name, which is read once for its tests."""
    return {golden.case.name: golden for golden in read_golden(folder / GOLDEN)}


def model_of(name: str, layer: Layer) -> onnx.ModelProto:
    return load_model(bundle_of(name, layer) / "model.onnx")


def assert_passes(name: str, layer: Layer) -> None:
    run = layer.right(model_of(name, layer))
    assert refused_outputs(bundle_of(name, layer), run) == 0


def assert_caught(name: str, layer: Layer, place: Place) -> None:
    run = layer.faults[place][1](model_of(name, layer))
    assert refused_outputs(bundle_of(name, layer), run) > 0


def cause_of(name: str, layer: Layer, place: Place) -> str:
    """Return the kind of the cause that is named first."""
    right = model_of(name, layer)
    return first_cause_of(bundle_of(name, layer), right, layer.faults[place][1](right))


def of_layer(name: str, *more: str, slow: Container[str] = ()) -> Any:
    """Return a case whose bundle one process reads; it is extended if the layer is slow."""
    marks = [pytest.mark.xdist_group(f"quantised {name}")]
    marks += [pytest.mark.extended] if name in slow else []
    return pytest.param(name, *more, marks=marks)


def of_fault(fault: tuple[str, str, str], slow: Container[str] = ()) -> Any:
    """Return a case of a fault as one value."""
    return pytest.param(fault, marks=of_layer(fault[0], slow=slow).marks, id="-".join(fault))


def all_faults(layers: Mapping[str, Layer], *, named: bool = False) -> list[tuple[str, str, str]]:
    """Return layer, name and products of each fault; of those alone whose cause is known."""
    return [
        (layer, *place)
        for layer, of in layers.items()
        for place, (cause, _) in of.faults.items()
        if cause is not None or not named
    ]
