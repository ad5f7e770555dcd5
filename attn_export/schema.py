"""Types of the JSON files that are read, with the ranges on which the rest of the code relies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr

from attn_export.dialect_names import STANDARD
from attn_export.tensorproto import CODES

_CONTROL = "\\x00-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff"
_PART = rf"[^/\\:*?\"<>|'`${_CONTROL}]+"
_ORDINARY = r"(?!\.{1,2}(?:/|\Z))"

MOST_BYTES, MOST_ELEMENTS = 255, 2**31
"""The most bytes of a tensor's name, and elements along its static axes: buffers of kits in C."""

Text = Annotated[str, Meta(max_length=2000, pattern=rf"\A[^{_CONTROL}]*\Z")]
LongText = Annotated[str, Meta(max_length=100_000, pattern=rf"\A[^{_CONTROL}]*\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=500, pattern=rf"\A[^{_CONTROL}]*\Z")]
RuntimeName = Annotated[
    str,
    Meta(
        max_length=500, pattern=rf"\A[^={_CONTROL}]+(?:==[0-9]{{1,5}}(?:\.[0-9]{{1,5}}){{0,3}})?\Z"
    ),
]
"""The name of a runtime, or of a release of it: ``ort-cpu==1.27.0``."""
_Reason = Annotated[str, Meta(max_length=2000, pattern=rf"\A[^{_CONTROL}]*\S[^{_CONTROL}]*\Z")]
FileName = Annotated[
    str, Meta(max_length=500, pattern=rf"\A{_ORDINARY}{_PART}(?:/{_ORDINARY}{_PART})*\Z")
]
"""A relative path with forward slashes, which cannot leave the folder on any system."""

EndName = Annotated[str, Meta(min_length=1, max_length=MOST_BYTES, pattern=rf"\A[^{_CONTROL}]*\Z")]
"""The name of an input, an output or an axis."""

GraphName = Annotated[str, Meta(max_length=200, pattern=rf"\A{_ORDINARY}{_PART}\Z")]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Dtype: TypeAlias = Literal[tuple(CODES)]  # type: ignore[valid-type]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Dim = Annotated[int, Meta(ge=0, le=2**31 - 1)] | EndName
_OutputDim = Count | Annotated[str, Meta(max_length=MOST_BYTES, pattern=rf"\A[^{_CONTROL}]*\Z")]
"""The size or name of an axis of an output; the name is empty if a user's module has none for
it."""

CACHES = {"present_key": "past_key", "present_value": "past_value"}
"""The caches of our own layers: the input of the next step that takes an output."""


class TensorSignature(Struct, frozen=True, forbid_unknown_fields=True):
    """The dtype and shape of an input or output."""

    dtype: Dtype
    shape: Annotated[tuple[_OutputDim, ...], Meta(max_length=8)]


class InputSignature(TensorSignature, frozen=True):
    """The dtype and shape of an input, whose axes all have a size or a name."""

    shape: Annotated[tuple[Dim, ...], Meta(max_length=8)]


class Needs(Struct, frozen=True, forbid_unknown_fields=True):
    """The versions that a graph requires; no version of ONNX Runtime if any runtime may run it."""

    opset: Count
    ir_version: Count
    onnxruntime: Annotated[str, Meta(pattern=r"\A[0-9]{1,9}(?:\.[0-9]{1,9}){0,9}\Z")] = ""


class GraphFile(Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a graph file: how its inputs and outputs differ from those of the cases.

    Attributes:
        name: The file name. In a manifest it is the key.
        dialect: One of `DIALECTS`.
        fixed: Dynamic axes of the bundle that are static here: ``{"query_len": 1}``.
        layouts: Axes of transposed inputs and outputs: ``{"past_value": (0, 1, 3, 2)}``.
        bound: Outputs that may share the buffer of an input: ``{"present_key": "past_key"}``.
        features: The features that a runtime must support; see `graph.requirements.features`.
        dtypes: Integer inputs with another dtype than in the cases: ``{"past_length": "int32"}``.
        exact: The graph that computes the same without rounding inputs of products to 8 bits, as
            this one does; "" if it does not.
    """

    name: str = ""
    dialect: Name = STANDARD
    fixed: dict[Name, Count] = {}
    layouts: dict[Name, tuple[Annotated[int, Meta(ge=0, le=7)], ...]] = {}
    bound: dict[Name, Name] = {}
    features: tuple[Name, ...] = ()
    dtypes: dict[Name, Literal["int32"]] = {}
    exact: Text = ""

    def takes(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the graph accepts these sizes of the dynamic axes."""
        return all(sizes.get(axis, size) == size for axis, size in self.fixed.items())


class GraphEntry(GraphFile, frozen=True, kw_only=True):
    """The description of a graph in a manifest, which has all of it."""

    needs: Needs
    attentions: Count | None
    ours: bool
    nodes: dict[Text, Text]
    foreign: bool = False
    form: Text = "kernels"


class _Tuning(Struct, frozen=True, forbid_unknown_fields=True):
    """The times in milliseconds by which `tune` of earlier versions selected forms of graphs."""

    processor: Text
    threads: Count
    milliseconds: Annotated[dict[Text, dict[Text, float]], Meta(max_length=10_000)]


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `manifest.json`.

    Attributes:
        unchanged: The inputs that no case changes alone.
        kept: The types of weights that have another one than most, by the paths of their modules.
    """

    format: Name
    name: Text
    versions: dict[Name, Text]
    graphs: Annotated[dict[GraphName, GraphEntry], Meta(min_length=1, max_length=100)]
    inputs: Annotated[dict[EndName, InputSignature], Meta(min_length=1, max_length=100)]
    outputs: Annotated[dict[EndName, TensorSignature], Meta(min_length=1, max_length=100)]
    weights: Text
    files: Annotated[dict[FileName, Digest], Meta(min_length=1, max_length=100_000)]
    digest: Digest
    bounds: dict[EndName, Annotated[list[Count | None], Meta(min_length=2, max_length=2)]] = {}
    roles: dict[EndName, EndName] = {}
    caches: dict[EndName, EndName] = {}
    unchanged: Annotated[tuple[EndName, ...], Meta(max_length=10_000)] = ()
    kept: Annotated[dict[Name, Literal["int4", "int8", "none"]], Meta(max_length=100_000)] = {}
    tuning: _Tuning | None = None

    def __post_init__(self) -> None:
        """Check rules that involve several fields."""
        ends = self.ends
        axes = {axis for end in ends.values() for axis in end.shape if isinstance(axis, str)}
        for name, signature in ends.items():
            fixed = [size for size in signature.shape if isinstance(size, int)]
            if len(name.encode()) > MOST_BYTES or math.prod(fixed) > MOST_ELEMENTS:
                shape = list(signature.shape)
                raise ValueError(f"{name} has a name or a shape that is too long: {shape}")
        for name, graph in self.graphs.items():
            force_setattr(graph, "name", name)
            if name not in self.files:
                raise ValueError(f"the graph {name} is not among its files")
            self._check_ends(name, graph)
            self._check_exact(name, graph)
            if not axes.issuperset(graph.fixed):
                raise ValueError(f"{name} fixes an axis that is not there: {set(graph.fixed)}")
        planned = [self.roles.get(axis, axis) for axis in axes]
        if not axes.issuperset(self.roles) or len(set(planned)) < len(planned):
            raise ValueError(f"the roles are not those of one axis each: {self.roles}")
        for output, source in self.caches.items():
            new, old = self.outputs.get(output), self.inputs.get(source)
            alike = new and old and (new.dtype, len(new.shape)) == (old.dtype, len(old.shape))
            if not alike or list(self.caches.values()).count(source) > 1:
                raise ValueError(f"{source} is not the cache that {output} continues")

    @property
    def next_inputs(self) -> dict[str, str]:
        """The input of the next step that takes an output; by default those of our own layers."""
        pairs = (self.caches or CACHES).items()
        return {o: i for o, i in pairs if o in self.outputs and i in self.inputs}

    @property
    def batch(self) -> str:
        """The name of the batch axis."""
        return next((axis for axis, role in self.roles.items() if role == "batch"), "batch")

    @property
    def ends(self) -> dict[str, TensorSignature]:
        """The inputs and outputs by name."""
        return {**self.inputs, **self.outputs}

    @property
    def shipped(self) -> list[GraphEntry]:
        """The graphs that programs run: all but those by which others are judged."""
        exact = {graph.exact for graph in self.graphs.values()}
        return [graph for name, graph in self.graphs.items() if name not in exact]

    def _check_exact(self, name: str, graph: GraphEntry) -> None:
        other = self.graphs.get(graph.exact)
        alike = ("dialect", "fixed", "layouts", "bound", "dtypes")
        if graph.exact and not (
            other and not other.exact and all(getattr(graph, x) == getattr(other, x) for x in alike)
        ):
            raise ValueError(f"{name} is judged by {graph.exact}, which is no graph like it")

    def _check_ends(self, name: str, graph: GraphEntry) -> None:
        """Check the inputs and outputs in the entry of a graph; see `__post_init__`."""
        ends = self.ends
        for end, order in graph.layouts.items():
            if end not in ends or sorted(order) != list(range(len(ends[end].shape))):
                raise ValueError(
                    f"{name}: the layout of {end} must be a permutation of its axes; "
                    f"got {list(order)}"
                )
        for output, source in graph.bound.items():
            is_there = output in self.outputs and source in self.inputs
            if not is_there or (self.caches or CACHES).get(output) != source:
                raise ValueError(f"{name} binds {output} to {source}, which is not its past")
        for end in graph.dtypes:
            if end not in self.inputs or self.inputs[end].dtype != "int64":
                raise ValueError(f"{name} takes {end} as int32, which is not an input of int64")


class Tolerance(Struct, frozen=True, forbid_unknown_fields=True):
    """Relative L2 tolerance for one output; infinite after some failed builds.

    Attributes:
        row: The tolerance for any row of the last axis.
    """

    whole: Annotated[float, Meta(gt=0)]
    row: Annotated[float, Meta(gt=0)]


class CaseEntry(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The entry of a case of the golden vectors.

    Attributes:
        shapes: The shape of each output of which the rows in `determined` alone are stored.
        rounded: The tolerance of graphs that round inputs of products to 8 bits.
    """

    name: Name
    kind: Name
    about: Text
    contents: tuple[Name, ...]
    ignored_rows: tuple[Count, ...]
    sizes: dict[Name, Count]
    folder: Annotated[str, Meta(pattern=r"\Atest_data_set_[0-9]{1,6}\Z")]
    tolerance: dict[Name, Tolerance | None] = field(name="allowed")
    uncompared: dict[Name, _Reason] = field(name="unusable")
    determined: dict[Name, tuple[Count, ...]] = {}
    shapes: dict[Name, Annotated[list[Count], Meta(min_length=2, max_length=8)]] = {}
    rounded: dict[Name, Tolerance | None] = {}


class GoldenIndex(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of `golden/index.json`. `budgets` are those of `Golden`."""

    inputs: list[Name]
    outputs: list[Name]
    cases: Annotated[list[CaseEntry], Meta(min_length=1, max_length=100_000)]
    budgets: Annotated[list[Name], Meta(max_length=10)] = []

    def __post_init__(self) -> None:
        """Check rules that involve several fields."""
        for key in ("name", "folder"):
            if len({getattr(case, key) for case in self.cases}) < len(self.cases):
                raise ValueError(f"two cases have one {key}")
        for case in self.cases:
            missing = set(self.outputs) - set(case.tolerance)
            missing |= set(self.outputs) - set(case.rounded or self.outputs)
            if missing:
                raise ValueError(f"{case.name} gives no tolerance for {min(missing)}")


class Distance(Struct, frozen=True, forbid_unknown_fields=True):
    """Distance between values q of a quantised model and values f of the float model.

    Attributes:
        part: The name of the compared output.
        sqnr: The signal-to-noise ratio 10·log10(‖f‖² / ‖q − f‖²), in dB.
        cosine: The cosine of the angle between f and q as vectors.
        row: The largest ‖q_row − f_row‖ / ‖f_row‖ over the slices along the last axis.
    """

    part: Name
    sqnr: float
    cosine: float
    row: float


class QualityFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `golden/quality.json`. It is empty if there is no float model to measure.

    Bundles before 0.3.0 have `heads`, `weights` and `splits`, which nothing reads.
    """

    cases: Annotated[list[Count], Meta(max_length=100)]
    budgets: Annotated[list[Name], Meta(max_length=10)]
    heads: Annotated[list[dict[Name, object]], Meta(max_length=100_000)] = []
    weights: Annotated[list[dict[Name, object]], Meta(max_length=100)] = []
    splits: Annotated[list[dict[Name, object]], Meta(max_length=100)] = []

    def __post_init__(self) -> None:
        """Check rules that involve several fields."""
        if self.budgets and not self.cases:
            raise ValueError("it has a budget, and names no case")
        if self.cases and not self.budgets:
            raise ValueError("it names no budget")


class ToolTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[tool.attn-export]` of pyproject.toml."""

    runtimes: list[Name] = []
    require: list[Name] = []
    budgets: list[Name] = []
    baseline: Text = ""


class ReportedVerdict(Struct, frozen=True):
    """What is read of a verdict in `report.json`."""

    case: Name
    status: Name


class ReportFile(Struct, frozen=True):
    """What is read of `report.json`."""

    verdicts: Annotated[list[ReportedVerdict], Meta(max_length=10_000_000)]


class BaselineFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a baseline file: the version and the relative errors of each graph."""

    format: Name
    versions: dict[Name, Text]
    errors: dict[Name, dict[Name, float]]
