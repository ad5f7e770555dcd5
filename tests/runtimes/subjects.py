"""Small subjects, one for each feature that a runtime may not support, and runs of them."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_export import AttentionSpec, Subject
from attn_export.bundle.golden import write_index, write_inputs, write_outputs
from attn_export.bundle.manifest import GOLDEN
from attn_export.commands.bundle_graphs import lower_all
from attn_export.export.export import export
from attn_export.graph.save import save_graphs
from attn_export.judge.judge import judge
from attn_export.reference.oracle import Oracle
from attn_export.results import WHOLE_DECODE, Golden, StoredCase, Verdict
from attn_export.runtimes.process import Worker
from attn_export.runtimes.protocol import Limits, Runtime
from attn_export.schema import GraphFile

MORE = os.environ.get("ATTN_EXPORT_MORE_RUNTIMES", "") not in ("", "0")
"""True if all runtimes that are here are measured, on all subjects: `scripts/matrix` does so."""

PADDING, CAUSAL = {"attn_mask": "bool[B,1,1,S]"}, {"causal": True}
CACHE, IN_PLACE = {"cache": "append"}, {"cache": "in-place"}
GROUPED, WEIGHTS = {"num_kv_heads": 1}, {"attn_weights": True}
ROTARY, TURNED = {"rotary": "half"}, {"rotary": "interleaved", "rotary_dim": 4}

FEW: dict[str, dict[str, object]] = {
    "plain": {},
    "padding": PADDING,
    "float mask": {"attn_mask": "float[B,H,L,S]"},
    "causal": CAUSAL,
    "cache, causal": {**CACHE, **CAUSAL},
    "cache, causal, padding, grouped": {**CACHE, **CAUSAL, **PADDING, **GROUPED},
    "cross, weights": {"cross": True, **WEIGHTS},
    "softcap": {"softcap": 1.0, **GROUPED},
    "alibi, causal": {"alibi": True, **CAUSAL},
    "relative bias, norm": {
        "relative_buckets": 8, "relative_max_distance": 16, "qk_norm": "layer", **CACHE,
    },
    "sinks, rotary": {"sinks": True, **CACHE, **CAUSAL, **TURNED},
    "linear, delta": {"kind": "linear", "update_rule": "delta", "cache": "state"},
    "linear, gated": {"kind": "linear", "update_rule": "gated", "cache": "state"},
    "in place": {**IN_PLACE, **CAUSAL, **GROUPED, **ROTARY},
    "float16": {**CACHE, **CAUSAL, "dtype": "float16"},
    "bfloat16": {**CACHE, **CAUSAL, "dtype": "bfloat16"},
    "int8": {"weights_dtype": "int8"},
    "int4": {"weights_dtype": "int4"},
}  # fmt: skip
"""The fields of specs, beside E 16 and H 2: what is tried by default."""

SUBJECTS = FEW | {
    "grouped": GROUPED,
    "cache, padding": {**CACHE, **PADDING},
    "causal, padding": {**CAUSAL, **PADDING},
    "cache, causal, weights": {**CACHE, **CAUSAL, **WEIGHTS},
    "rotary": {**CACHE, **ROTARY},
    "rotary dynamic": {
        **ROTARY, "rotary_scaling": "dynamic", "rotary_factor": 2.0, "rotary_original_len": 20,
        "position_ids": True,
    },
    "norm, packed": {"qk_norm": "rms", "packed_qkv": True},
    "softcap by 50": {"softcap": 50.0, **GROUPED},
    "window": {"window_left": 2, "window_right": 2},
    "window, cache": {"window_left": 3, **CACHE, **CAUSAL},
    "alibi": {"alibi": True},
    "alibi, cache": {"alibi": True, **CACHE, **CAUSAL},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True},
    "in place, bfloat16": {**IN_PLACE, **CAUSAL, "dtype": "bfloat16"},
    "in place, float16, norms": {**IN_PLACE, **CAUSAL, "dtype": "float16", "qk_norm": "rms"},
    "in place, padding": {**IN_PLACE, **PADDING},
}  # fmt: skip

LIMITS = Limits(threads=1, seconds=120, memory_mib=None)
EVERY = 1 if MORE else 3
"""Of the shapes, in their order, so many are left out between two: the first has one query."""
LARGEST = 2**20 if MORE else 257
"""The largest size of those: half of the time of all cases is that of ten beyond."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A subject's graphs and golden vectors on disk.

    Attributes:
        axes: The axes of every input and output, by name.
    """

    folder: Path
    forms: tuple[GraphFile, ...]
    axes: dict[str, tuple[str | int, ...]]
    cases: tuple[StoredCase, ...]
    goldens: dict[str, Golden]


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all processes of the tests share."""
    base = factory.getbasetemp()  # each process has its own, in one that is theirs together
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "subjects"
    folder.mkdir(exist_ok=True)
    return folder


def stored(name: str, shared: Path) -> Stored:
    """Return a subject, made by the first process of the tests that needs it."""
    folder = shared / name.replace(",", "").replace(" ", "-")
    note = folder / "stored.pickle"
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not note.exists():
            note.write_bytes(pickle.dumps(_made(name, folder)))
    found: Stored = pickle.loads(note.read_bytes())
    return found


def _made(name: str, folder: Path) -> Stored:
    """Export, lower, and compute the reference, as a build does."""
    spec = AttentionSpec(embed_dim=16, num_heads=2, **SUBJECTS[name])
    subject = Subject.from_spec(spec)
    graphs, _ = lower_all(export(subject), ("all",))
    folder.mkdir(exist_ok=True)
    save_graphs({graph.file.name: graph.model for graph in graphs}, folder)
    whole = subject.plan().cases
    cases = [
        case
        for number, case in enumerate(whole)
        if case.kind != "shape" or (number % EVERY == 0 and max(case.sizes.values()) <= LARGEST)
    ]
    oracle = Oracle(subject)
    cases = [case for case in map(oracle.move_off_ties, cases) if case is not None]
    written = [write_inputs(folder / GOLDEN, i, case) for i, case in enumerate(cases)]
    goldens = [oracle.golden(case) for case in cases]
    for number, golden in enumerate(goldens):
        write_outputs(folder / GOLDEN, number, golden)
    write_index(folder / GOLDEN, goldens)
    axes = {**spec.input_shapes(), **spec.output_shapes()}
    named = {golden.case.name: golden for golden in goldens}
    return Stored(folder, tuple(graph.file for graph in graphs), axes, tuple(written), named)


def what_is_wrong(target: Runtime, subject: Stored, form: GraphFile, out: Path) -> str:
    """Return the reason that a runtime cannot run a graph, or its wrong results; or "".

    The support table of the runtime is ignored.
    """
    cases = [case for case in subject.cases if case.kind == WHOLE_DECODE or form.takes(case.sizes)]
    files = {case.name: (case.name, case.folder, out / str(i)) for i, case in enumerate(cases)}
    decodes = [case.name for case in cases if case.kind == WHOLE_DECODE]
    inputs = list(next(iter(subject.goldens.values())).case.inputs)
    problems, count = [], 0
    with Worker(target, LIMITS) as worker:
        graph = subject.folder / form.name
        names = (name.removeprefix("past_") for name in subject.axes if name.startswith("past_"))
        caches = {f"present_{name}": f"past_{name}" for name in names if name != "length"}
        given = list(files.values()), form, subject.axes, decodes
        worker.send_job(graph, inputs, *given, caches=caches)
        for result in worker.results():
            count += 1
            if result.error:
                problems.append(f"{result.case}: {result.error}")
                continue
            outputs = result.read_outputs()
            golden = subject.goldens[result.case]
            if not target.keeps_non_finite:
                golden = dataclasses.replace(golden, determined={})
            verdicts = judge(target.name, form.name, golden, outputs)
            problems += list(_failures(verdicts))
    if worker.outcome != "ran":
        return f"{worker.outcome}: {worker.reason}"
    assert count == len(cases) > 0
    return f"{len(problems)} wrong: {problems[0]}" if problems else ""


def _failures(verdicts: list[Verdict]) -> Iterator[str]:
    for verdict in verdicts:
        if verdict.status == "failed":
            yield f"{verdict.case}: {verdict.output}: {verdict.message}"
