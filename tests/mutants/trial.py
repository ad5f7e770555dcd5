"""Trials of mutants of the graphs of one bundle: whether they are faults, and are caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from mutants.in_inputs import in_inputs
from mutants.in_operators import in_operators
from mutants.in_sizes import in_sizes
from mutants.in_softmax import in_softmax
from mutants.in_values import in_values
from mutants.in_weights import in_weights
from mutants.mutant import Kinds, Mutant, Setting
from mutants.own_inputs import own_cases

from attn_export.bundle.golden import read_golden, stored_cases
from attn_export.bundle.manifest import GOLDEN, read_manifest, shapes_of
from attn_export.errors import one_line
from attn_export.export.subject import Subject
from attn_export.float64.evaluate import Evaluation
from attn_export.judge.judge import judge
from attn_export.reference.oracle import Oracle
from attn_export.reference.tolerance import narrow
from attn_export.results import WHOLE_DECODE, Arrays, Golden
from attn_export.runtimes.decode_steps import decode
from attn_export.runtimes.engines.ort_cpu import OrtCpu
from attn_export.runtimes.worker import to_case_layout, to_graph_layout
from attn_export.schema import GraphFile
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import is_floating, read_tensors

KINDS: Sequence[Kinds] = (in_values, in_sizes, in_softmax, in_inputs, in_operators, in_weights)

UNKNOWN = "cannot be evaluated"
Fate = Literal["caught", "refused", "missed"]


@dataclasses.dataclass(frozen=True)
class Tried:
    """Result of a mutant.

    Attributes:
        fate: Whether the golden vectors caught it; "refused" where ONNX Runtime did not run it.
        by: The golden case that caught it, or why it did not run.
        seen: The additional case in which its float64 outputs are wrong; empty if there is none.
    """

    bundle: str
    graph: str
    kind: str
    row: str
    what: str
    fate: Fate
    by: str
    seen: str

    @property
    def is_fault(self) -> bool:
        """Return whether it is a fault."""
        return bool(self.seen) and not self.is_unknown

    @property
    def is_unknown(self) -> bool:
        """Return whether it could not be evaluated."""
        return self.seen.startswith(UNKNOWN)


class Trials:
    """The graphs of a bundle, its golden vectors, and inputs beside these."""

    def __init__(self, name: str, folder: Path, spec: AttentionSpec) -> None:
        self.name, self._spec = name, spec
        self.manifest = read_manifest(folder)
        self.files = {file.name: file for file in self.manifest.graphs.values()}
        self.models = {file: onnx.load(folder / file) for file in self.files}
        self._heads = (spec.num_heads, spec.num_kv_heads)
        self._axes = shapes_of(self.manifest.ends)
        self._golden = sorted(_golden_of(folder), key=_cost)
        self._own: list[Golden] = []
        self._mutants: dict[str, list[Mutant]] = {}

    def mutants(self, file: str) -> list[Mutant]:
        """Return all mutants of a graph."""
        if file not in self._mutants:
            single = self.files[file].fixed.get("query_len") == 1
            setting = Setting(self.models[file], *self._heads, single)
            self._mutants[file] = [mutant for kinds in KINDS for mutant in kinds(setting)]
        return self._mutants[file]

    def changed(self, file: str, mutant: Mutant) -> onnx.ModelProto:
        """Return a graph with a fault."""
        model = onnx.ModelProto()
        model.CopyFrom(self.models[file])
        mutant.change(model)
        return model

    def tried(self, file: str, mutant: Mutant, scratch: Path) -> Tried:
        """Return what comes of a mutant."""
        model = self.changed(file, mutant)
        fate, by = self.judged(file, model, scratch)
        seen = "" if fate == "refused" else self.seen(file, model)
        return Tried(self.name, file, mutant.kind, mutant.row, mutant.what, fate, by, seen)

    def judged(self, file: str, model: onnx.ModelProto, scratch: Path) -> tuple[Fate, str]:
        """Return whether the golden vectors catch a graph, as `verify --graph` would."""
        form, path = self.files[file], scratch / "mutant.onnx"
        onnx.save(model, path)
        try:
            engine = OrtCpu().load(path, 1)
        except Exception as error:
            return "refused", one_line(error)
        for golden in self._golden:
            if not form.takes(golden.case.sizes):
                continue
            try:
                outputs = self._run(engine, form, golden)
            except Exception as error:
                return "refused", f"{golden.case.name}: {one_line(error)}"
            if any(v.status == "failed" for v in judge("ort-cpu", file, golden, outputs)):
                return "caught", golden.case.name
        return "missed", ""

    def _run(self, engine, form: GraphFile, golden: Golden) -> Arrays:
        def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            outputs = engine.run(to_graph_layout(inputs, form.layouts, form.dtypes), form.bound)
            return to_case_layout(outputs, form.layouts)

        inputs = dict(golden.case.inputs)
        if golden.case.kind != WHOLE_DECODE:
            return run(inputs)
        return decode(run, inputs, self._axes, form.fixed)

    def seen(self, file: str, model: onnx.ModelProto) -> str:
        """Return the case of its own in which a graph is wrong in float64, or an empty text."""
        form = self.files[file]
        try:
            evaluation = Evaluation(model)
        except Exception as error:
            return f"{UNKNOWN}: {one_line(error)}"
        for golden in self.own():
            if not form.takes(golden.case.sizes):
                continue
            try:
                found = self._evaluated(evaluation, form, golden)
            except Exception as error:
                return f"{UNKNOWN}: {one_line(error)}"
            if any(v.status == "failed" for v in judge("float64", file, golden, found)):
                return golden.case.name
        return ""

    @staticmethod
    def _evaluated(evaluation: Evaluation, form: GraphFile, golden: Golden) -> Arrays:
        values = evaluation.values(to_graph_layout(golden.case.inputs, form.layouts, form.dtypes))
        outputs = to_case_layout(evaluation.outputs_of(values), form.layouts)
        wanted = golden.expected
        return {
            name: narrow(array, wanted[name].dtype) if is_floating(array.dtype) else array
            for name, array in outputs.items()
        }

    def own(self) -> list[Golden]:
        """Return the cases beside the golden ones, with their reference."""
        if not self._own:
            subject = Subject.from_spec(self._spec)
            oracle = Oracle(subject)
            found = [oracle.usable(case) for case in own_cases(subject)]
            self._own = sorted((g for g in found if not g.uncompared), key=_cost)
        return self._own


def _cost(golden: Golden) -> int:
    decodes = golden.case.kind == WHOLE_DECODE
    return sum(a.size for a in golden.case.inputs.values()) * (100 if decodes else 1)


def _golden_of(folder: Path) -> list[Golden]:
    names, stored = stored_cases(folder / GOLDEN)
    places = {case.name: case.folder for case in stored}
    found = []
    for golden in read_golden(folder / GOLDEN):
        inputs = read_tensors(places[golden.case.name], "input", names)
        case = dataclasses.replace(golden.case, inputs=inputs)
        found.append(dataclasses.replace(golden, case=case))
    return found
