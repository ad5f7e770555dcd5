"""Judges a planted fault by `compare`, and says whether it is one without the package."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from planted.config_faults import ConfigFault
from planted.edited_graph import Edited, GraphFault

from attn_export.commands.compare import compare
from attn_export.errors import AttnExportError
from attn_export.parts.whole_models.export_layouts import Entry, read_export
from attn_export.parts.whole_models.model_checkpoint import read_checkpoint
from attn_export.parts.whole_models.model_reference import reference_of
from attn_export.reference.reference import Reference
from attn_export.results import BASE, CHANGED, Case
from attn_export.runtimes.run_options import RunOptions

EXPORTS = Path(__file__).resolve().parents[1] / "exports"
RUN = RunOptions.of(runtimes=["ort-cpu"])

CASES = 10
"""The number of cases of a graph, the first ones, beside changes of single inputs."""

LEAST_CONFIG, LEAST_GRAPH = 1e-6, 3e-6
"""The least relative distance of an output that makes a change a fault: of float64 runs of two
models of transformers, and of float32 runs of two graphs."""

_LENGTH, _PADDED = 100, 7
"""The number of tokens of the batch on which two models are run, and of those that are padding."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A fault that was planted and judged.

    Attributes:
        what: What was changed: a field with its values, or the places of the graph.
        report: The first explanation, or the refusal.
    """

    kind: str
    graph: str
    what: str
    size: float
    caught: bool
    layer: bool
    cause: bool
    report: str
    seconds: float


class RightGraph:
    """A graph that is right, and its checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path.relative_to(EXPORTS))
        self.checkpoint = path.parents[1] / "checkpoint"

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.checkpoint / "config.json").read_text())
        return found

    @functools.cached_property
    def entry(self) -> tuple[Entry, Any]:
        exported = read_export(self.path)
        return exported.entries[0], exported.layout.promises

    @functools.cached_property
    def model(self) -> Any:
        return read_checkpoint(self.checkpoint).load()

    def reference(self, model: Any) -> Reference:
        """Return the reference with the first cases; the reference of each is found once."""
        reference = reference_of(model, *self.entry)
        plan = reference.plan()
        others = [c for c in plan.cases if not c.name.startswith(CHANGED)][:CASES]
        changed = [c for c in plan.cases if c.name.startswith(CHANGED)]
        plan = dataclasses.replace(plan, cases=(*others, *changed))

        @functools.cache
        def oracle(least_eps: float) -> Any:
            found: Any = reference.oracle(least_eps)
            found.golden = _once(found.golden)
            return found

        return dataclasses.replace(reference, plan=lambda: plan, oracle=oracle)

    @functools.cached_property
    def right(self) -> Reference:
        return self.reference(self.model)

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all values in the base case."""
        case = next(c for c in self.right.plan().cases if c.name == BASE)
        model = onnx.load(self.path)
        shown = {x.name for x in model.graph.output}
        names = [x for n in model.graph.node for x in n.output if x and x not in shown]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        values = _run(_session(model), case, [*shown, *names])
        return {name: value.shape for name, value in values.items()}

    def edited(self) -> Edited:
        return Edited(onnx.load(self.path), self.shapes)

    def distance(self, model: onnx.ModelProto) -> float | None:
        """Return the largest distance of a graph from the right one; None if it cannot run.

        It runs many more cases than are judged.
        """
        worst = 0.0
        try:
            session = _session(model)
            outputs = [_run(session, case) for case in self._probes]
        except Exception:  # of ONNX Runtime: the edited graph is no graph
            return None
        for case, got, expected in zip(self._probes, outputs, self._outputs, strict=True):
            for name, right in expected.items():
                worst = max(worst, _distance(got[name], right, _rows(case, name, right)))
        return worst

    @functools.cached_property
    def _probes(self) -> tuple[Case, ...]:
        return reference_of(self.model, *self.entry).plan().cases

    @functools.cached_property
    def _outputs(self) -> list[dict[str, np.ndarray]]:
        session = _session(onnx.load(self.path))
        return [_run(session, case) for case in self._probes]


def _once(call: Any) -> Any:
    """Return a function of a case that is called once for each name."""
    known: dict[str, Any] = {}

    def golden(case: Case) -> Any:
        if case.name not in known:
            known[case.name] = call(case)
        return known[case.name]

    return golden


def _session(model: onnx.ModelProto) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _run(session: Any, case: Case, names: Any = None) -> dict[str, np.ndarray]:
    names = names or [x.name for x in session.get_outputs()]
    taken = {x.name for x in session.get_inputs()}
    inputs = {name: array for name, array in case.inputs.items() if name in taken}
    return dict(zip(names, session.run(names, inputs), strict=True))


def _rows(case: Case, name: str, output: np.ndarray) -> np.ndarray:
    """Return which rows of an output hold tokens."""
    kept = np.ones(output.shape[:-1], bool)
    if case.ignored_rows and output.ndim:
        kept[list(case.ignored_rows)] = False
        kept.ravel()[list(case.judged_rows.get(name, ()))] = True
    return kept


def _distance(got: np.ndarray, right: np.ndarray, kept: np.ndarray) -> float:
    if got.shape != right.shape:
        return float("inf")
    a, b = got[kept].astype(np.float64), right[kept].astype(np.float64)
    size = float(np.linalg.norm(b)) or 1.0
    found = float(np.linalg.norm(a - b)) / size
    return found if np.isfinite(found) else float("inf")


def of_config(graph: RightGraph, kind: ConfigFault, folder: Path) -> Drawn | None:
    """Plant a fault in a config and judge the right graph by it; None if it is none."""
    started, changed = time.monotonic(), kind.change(graph.config)
    if changed is None or graph.path.stem == "encoder_model":  # which most fields leave as it is
        return None
    shutil.copytree(graph.checkpoint, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(changed))
    try:
        model = read_checkpoint(folder).load()
        size = _between(graph.model, model)
    except (AttnExportError, ValueError, RuntimeError, TypeError, KeyError, IndexError):
        return None  # a model that is refused is no fault
    if size < LEAST_CONFIG:
        return None
    fields = [key for key in changed if changed[key] != graph.config.get(key)]
    what = "; ".join(f"{key}: {graph.config.get(key)} → {changed[key]}" for key in fields)
    passed, text = _judged(lambda: graph.reference(model), graph.path)
    named = _has(text, (*kind.words, *fields))
    layer = named or bool(re.search(r"\b(layers?|h)[._ ]0\b|all layers|lm_head|logits", text))
    return Drawn(
        kind.name, graph.name, what, size, not passed, layer and not passed, named and not passed,
        text, time.monotonic() - started,
    )  # fmt: skip


def _between(right: Any, other: Any) -> float:
    """Return the distance of the float64 outputs of two models, at tokens of a padded batch."""
    random = torch.Generator().manual_seed(11)
    ids = torch.randint(3, 64, (2, _LENGTH), generator=random)
    mask = torch.ones_like(ids)
    mask[1, :_PADDED] = 0
    outputs = []
    for model in (right, other):
        kwargs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if model.config.is_encoder_decoder:
            kwargs["decoder_input_ids"] = ids[:, :40]
            if model.main_input_name == "input_features":
                shape = 2, model.config.num_mel_bins, 2 * model.config.max_source_positions
                features = torch.randn(shape, generator=random.manual_seed(5))
                kwargs = {"input_features": features.double(), "decoder_input_ids": ids[:, :40]}
        elif "bert" not in model.config.model_type:
            kwargs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            outputs.append(copy.deepcopy(model).double()(**kwargs).logits.numpy())
    kept = np.ones(outputs[0].shape[:2], bool)
    if kept.shape == mask.shape:
        kept = mask.bool().numpy()
    # Rows of padding alone are not a number in some models.
    kept &= np.isfinite(outputs[0]).all(-1)
    return _distance(outputs[1], outputs[0], kept)


def of_graph(
    graph: RightGraph, kind: GraphFault, random: np.random.Generator, folder: Path
) -> Drawn | None:
    """Plant a fault in a graph and judge it; None if there is no place, or it is none."""
    started, edited = time.monotonic(), graph.edited()
    places = list(kind.places(edited))
    if not places:
        return None
    names = places[random.integers(len(places))]()
    layers = edited.layers_at(names)
    size = graph.distance(edited.model)
    if size is None or size < LEAST_GRAPH:
        return None
    for file in graph.path.parent.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder)
    path = folder / graph.path.name
    onnx.save(edited.model, path)
    passed, text = _judged(lambda: graph.right, path)
    numbers = {int(x) for x in re.findall(r"(?:layers?|h|key_values|present)[._ /](\d+)", text)}
    exact = any(len(name) > 3 and re.search(re.escape(name) + r"(?![\w.])", text) for name in names)
    ends = r"embed|wte|lm_head|ln_f|logits|model\.norm|final|all layers|mask|position|rotary"
    is_shared = bool(re.search(ends, text)) and not numbers and edited.is_shared(names)
    layer = exact or bool(numbers & layers) or is_shared
    cause = exact or _has(text, kind.words)
    return Drawn(
        kind.name, graph.name, ", ".join(names[:4]) + f" (layers {sorted(layers)})", size,
        not passed, layer and not passed, cause and not passed, text, time.monotonic() - started,
    )  # fmt: skip


def _has(text: str, words: tuple[str, ...]) -> bool:
    """Return whether a text has one of the words; those of at most 3 letters alone."""
    found = (rf"\b{re.escape(w)}\b" if len(w) <= 3 else re.escape(w) for w in words)
    return any(re.search(word, text.lower()) for word in found)


def _judged(reference: Any, path: Path) -> tuple[bool, str]:
    """Return whether a graph passed, and the first explanation or the refusal."""
    try:
        report = compare(reference, path, RUN)
    except AttnExportError as error:
        return False, f"refused: {error}"
    except Exception as error:  # a fault of the package: listed as a miss
        return True, f"{type(error).__name__}: {error}"
    shown = report.explanations or report.notes[-1:]
    text = shown[0] if shown else "no explanation"
    return report.passed, "passed" if report.passed else text
