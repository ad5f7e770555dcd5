"""The line of `range`: a graph, its inputs, the analysis, and the graph that is mended."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import ValueInfoProto

from attn_export.bundle.golden import read_golden, stored_cases, with_inputs
from attn_export.bundle.manifest import GOLDEN
from attn_export.bundle.quality_vectors import is_plain
from attn_export.cases.draw import add_sums, axis_names, draw_inputs
from attn_export.dialect_names import MODEL
from attn_export.errors import GraphError, UsageError, first_few, printable
from attn_export.export.given_inputs import fitting, read_given
from attn_export.float64.bounded import refuse_unfit
from attn_export.graph.load import weight_files
from attn_export.graph.ranges import declared_outputs, described_inputs
from attn_export.graph.save import check_replaceable, put_in_place
from attn_export.graph.signature_check import dtype_name
from attn_export.output_folder import write_errors
from attn_export.parts.value_ranges.float_formats import FORMATS
from attn_export.parts.value_ranges.keep_search import search
from attn_export.parts.value_ranges.lockstep import Lockstep, RoundedRun
from attn_export.parts.value_ranges.mixed_graph import check_fixable, write_mixed
from attn_export.parts.value_ranges.range_analysis import Analysis, analyse
from attn_export.parts.value_ranges.range_result import Fix, RangeResult
from attn_export.parts.value_ranges.range_rule import largest
from attn_export.parts.value_ranges.streamed_graph import StreamedGraph
from attn_export.quality import Budget
from attn_export.reference.reference import GraphRuns
from attn_export.results import Case
from attn_export.runtimes.child import limited
from attn_export.runtimes.run_options import Progress
from attn_export.temp_folders import folder_beside, scratch
from attn_export.tensorfile import Array, read_outputs, read_tensors, write_tensors

_MEANING = (
    "each node's result is rounded to {format}; what a node adds up within is not, as in kernels "
    "that accumulate in float32"
)


def ranges_of(
    path: Path, sets: InputSets | None, inputs: Sequence[str], format_: str,
    fix: Path | None = None, budgets: Sequence[Budget] = (), progress: Progress | None = None,
) -> RangeResult:  # fmt: skip
    """Return which values of a graph leave a narrow format, and write the mended graph.

    `sets`: The inputs that come with the graph, if it has some.
    """
    progress = progress or Progress()
    progress.phase("reading the graph")
    graph, narrow = StreamedGraph(path), FORMATS[format_]
    sets = _user_sets(graph, inputs) if inputs else sets or _random_sets(graph)
    analysis = analyse(graph, sets.sets, narrow, progress, budgets)
    notes = [sets.note, _MEANING.format(format=format_), *_notes(graph, analysis)]
    result = RangeResult(path.name, analysis, notes)
    if fix is None:
        return result
    check_fixable(graph)
    return RangeResult(
        path.name, analysis, notes, _mended(graph, sets.sets, analysis, fix, progress)
    )


def overflow_notes(path: Path, sets: Sequence[Mapping[str, Array]]) -> tuple[str, ...]:
    """Return which values of a graph leave float16, as notes of a build."""
    analysis = analyse(StreamedGraph(path), sets, FORMATS["float16"], Progress())
    made = [
        f"{f.facts.node or f.facts.name} up to {f.facts.largest:.4g}"
        for f in analysis.findings
        if f.made and f.kind == "overflow"
    ]
    if not made:
        return ()
    return (
        f"leaves float16, whose largest number is 65504: {first_few(made)}; build it in float32, "
        "and attn-export range BUNDLE --fix OUT.onnx keeps in float32 what must be",
    )


@contextlib.contextmanager
def graph_of(
    path: Path | None, module: str | None, model: Path | None, fix: Path | None = None
) -> Iterator[tuple[Path, InputSets | None]]:
    """Yield the file of a graph, and the inputs that come with it.

    Raises:
        UsageError: If there is not one source, or `fix`, the file to write, is one to keep.
    """
    given = [str(source) for source in (path, module, model) if source is not None]
    if len(given) != 1:
        raise UsageError(
            f"{' and '.join(given) or 'nothing'} to look at; give one of MODEL.onnx, BUNDLE, "
            "--module PATH.py:FUNCTION and --model FOLDER"
        )
    if path is None:
        with scratch(in_memory=False) as folder:
            yield folder / MODEL, _exported(module, model, folder)
    else:
        file = path / MODEL if path.is_dir() else path
        if fix is not None:
            check_replaceable(fix, file, "--fix")
        yield file, _stored_sets(path) if path.is_dir() else None


def _stored_sets(bundle: Path) -> InputSets:
    names, cases = stored_cases(bundle / GOLDEN)
    goldens = with_inputs(read_golden(bundle / GOLDEN), cases, names)
    return _planned_sets((g.case for g in goldens if is_plain(g.case)), str(bundle))


def _exported(module: str | None, model: Path | None, folder: Path) -> InputSets:
    """Write the graph of a module or a checkpoint, and return the inputs of its cases."""
    from attn_export.export.export import export
    from attn_export.export.subject import Subject
    from attn_export.export.user_module import load_subject
    from attn_export.graph.save import save_graphs

    subject = load_subject(module) if module else Subject.from_model(str(model))
    save_graphs({MODEL: export(subject).model}, folder)
    plain = (case for case in subject.plan().cases if is_plain(case))
    return _planned_sets(plain, str(module or model))


def _notes(graph: StreamedGraph, analysis: Analysis) -> Iterator[str]:
    bodies = [node.op_type for node in graph.nodes if node.op_type in ("If", "Loop", "Scan")]
    if bodies:
        yield f"values inside {', '.join(sorted(set(bodies)))} are not rounded, their results are"
    if graph.narrow_dtypes():
        yield "the graph has narrow types itself: values of other types are not rounded"
    rough = [expected.best.whole for expected in analysis.expected if expected.is_rough]
    if rough:
        yield (
            f"rounding to the digits of {analysis.format.name} alone changes outputs by "
            f"{max(rough):.2g}: the digits are too few, not the exponents"
        )


def _mended(
    graph: StreamedGraph, sets: Sequence[Mapping[str, Array]], analysis: Analysis, output: Path,
    progress: Progress,
) -> Fix:  # fmt: skip
    """Search for nodes to keep, write the graph, and judge the file that was written."""
    kept = search(graph, sets, analysis, progress)
    names = [graph.name_of(n) for n in sorted(kept.nodes)]
    seconds, count = sum(analysis.lockstep.seconds), len(graph.nodes)
    time = (
        sum(analysis.lockstep.seconds[n] for n in kept.nodes) / seconds
        if names and seconds
        else 0.0
    )
    if not kept.passes:
        return Fix("", names, sorted(kept.clipped), count, time, 0, kept.error, 0, len(sets), "")
    progress.phase(f"writing {output.name}")
    with write_errors(output), folder_beside(output) as folder:
        new = folder / output.name
        data = write_mixed(graph, kept, analysis.format, new)
        progress.phase("judging the written graph")
        written = StreamedGraph(new)
        lockstep = Lockstep(written, analysis.format, frozenset({analysis.format.name}))
        outputs = [lockstep.run(each, [RoundedRun()])[0] for each in sets]
        pairs = list(zip(analysis.expected, outputs, strict=True))
        passed = sum(expected.passes(found) for expected, found in pairs)
        fix = Fix(
            str(output), names, sorted(kept.clipped), count, time, _wide_bytes(written),
            largest([expected.error(found) for expected, found in pairs]), passed, len(sets),
            _beside(new, sets[0], analysis, progress), kept.is_least,
        )  # fmt: skip
        if passed < len(sets):
            return dataclasses.replace(fix, path="")
        put_in_place(new, data, output, weight_files(graph.model, graph.path.parent))
    return fix


def _wide_bytes(written: StreamedGraph) -> int:
    """Return the bytes that weights in float32 take more than in a narrow format."""
    tensors = written.model.graph.initializer
    wide = (t for t in tensors if t.data_type == onnx.TensorProto.FLOAT)
    return sum(2 * math.prod(t.dims) for t in wide if t.name in written.uses)


def _beside(
    output: Path, inputs: Mapping[str, Array], analysis: Analysis, progress: Progress
) -> str:
    """Return what ONNX Runtime on the CPU gives, which is no proof: it hides overflows."""
    progress.phase("running the written graph in ort-cpu")
    try:
        with scratch() as folder:
            write_tensors(folder, "input", inputs)
            count = limited(
                f"{__name__}:_run_model", output.name, folder=str(folder),
                model=str(output.absolute()),
            )  # fmt: skip
            found = read_outputs(folder, count)
    except GraphError as error:
        return f"cannot run it: {error}"
    expected = analysis.expected[0]
    state = "passes" if expected.passes(found) else "differs"
    return f"{state} on the first inputs, error {expected.error(found).whole:.2g}"


def _run_model(folder: str, model: str) -> int:
    """Run a graph on the inputs in a folder, write its outputs beside them, return their number."""
    from attn_export.runtimes.engines.ort_cpu import CPU_PROVIDER, sdk

    place = Path(folder)
    session = sdk().InferenceSession(model, providers=[CPU_PROVIDER])
    names = [value.name for value in session.get_inputs()]
    results = session.run(None, read_tensors(place, "input", names))
    outputs = {value.name: x for value, x in zip(session.get_outputs(), results, strict=True)}
    write_tensors(place, "output", outputs)
    return len(outputs)


# -- the inputs whose values are looked at: a user's, stored cases, or random ones --------------

_MOST_SETS = 32
"""The largest number of stored cases that are used."""

_BATCH, _LENGTH = 2, 16
"""Sizes of free axes of random inputs."""

_RANDOM = "ranges are those of random inputs; give real ones with --inputs FILE.npz"


@dataclasses.dataclass(frozen=True)
class InputSets:
    """Sets of inputs by name, and a note on what they are."""

    sets: Sequence[Mapping[str, Array]]
    note: str


def _user_sets(graph: StreamedGraph, sources: Sequence[str]) -> InputSets:
    """Return the inputs in files and those that functions return.

    `sources`: ``FILE.npz`` or ``PATH.py:FUNCTION``, whose function returns arrays by name, or
    several such mappings.
    """
    sets: list[Mapping[str, Array]] = []
    for source in sources:
        given = read_given(source, graph.inputs, takes_prompts=False)
        sets += [_checked(graph, each, source) for each in given.sets]
    return InputSets(sets, f"inputs of {', '.join(sources)}")


def _planned_sets(cases: Iterable[Case], source: str) -> InputSets:
    """Return the inputs of cases that are plain random numbers."""
    sets = [case.inputs for case in cases][:_MOST_SETS]
    return InputSets(sets, f"inputs of {len(sets)} cases of {source}; {_RANDOM}")


def _random_sets(graph: StreamedGraph) -> InputSets:
    """Return random inputs of sizes at which a graph runs."""
    model = graph.model
    inputs, known_sums, notes = described_inputs(model, {})
    names = set(graph.inputs)
    inputs = {name: input_ for name, input_ in inputs.items() if name in names}
    runs = GraphRuns(graph, inputs, declared_outputs(model), str(graph.path))
    axes = axis_names(inputs, known_sums)
    sums = runs.sums(axes, known_sums, model)
    if sums is None:
        raise GraphError(
            f"{graph.path} cannot be evaluated at random sizes; give inputs with --inputs "
            f"FILE.npz: {runs.problem}"
        )
    free = [axis for axis in axes if axis not in sums]
    for length in (_LENGTH, 4, _BATCH, 1):
        sizes = {axis: _BATCH if "batch" in axis.lower() else length for axis in free}
        if runs.runs(add_sums(sizes, sums)):
            drawn = draw_inputs(inputs, add_sums(sizes, sums), seed_words=("ranges",))
            return InputSets([drawn], "; ".join((_RANDOM, *notes)))
    raise GraphError(f"{graph.path} runs at no small sizes; give inputs with --inputs FILE.npz")


def _checked(graph: StreamedGraph, given: Mapping[str, Any], source: str) -> dict[str, Array]:
    """Return arrays in the types of a graph's inputs; raise UsageError if they do not fit."""
    values = {v.name: v for v in graph.model.graph.input if v.name in graph.inputs}
    for name, input_ in described_inputs(graph.model, {})[0].items():
        refuse_unfit(name, dataclasses.replace(input_, shape=()), graph.path)
    for name in values:
        if name not in given:
            raise UsageError(
                f"--inputs {source} lacks {printable(name, 60)}; the inputs of {graph.path} are "
                f"{printable(', '.join(values), 200)}"
            )
    return {
        name: fitting(
            given[name], name, dtype_name(value), _shape(value), source, "the graph"
        )
        for name, value in values.items()
    }  # fmt: skip


def _shape(value: ValueInfoProto) -> tuple[int | str, ...] | None:
    """Return the declared axes of an input, with "?" for those without a size."""
    kind = value.type.tensor_type
    sizes = (d.dim_value if d.HasField("dim_value") else "?" for d in kind.shape.dim)
    return (*sizes,) if kind.HasField("shape") else None
