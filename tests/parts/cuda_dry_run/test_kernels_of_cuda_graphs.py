"""Kernels that the dialect `cuda` launches in dry runs, against the goals for one layer."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from conftest import small_spec
from shared import extended
from test_ort_cuda import over_stand_in

from attn_export.dialect_names import CUDA
from attn_export.export.export import export
from attn_export.export.subject import Subject
from attn_export.graph import IrGraph
from attn_export.graph.lower import DECODE, PREFILL, lower
from attn_export.graph.save import save_graphs
from attn_export.parts.cuda_dry_run.dry_run import observe
from attn_export.parts.cuda_dry_run.dry_run_results import Step, architectures_named

pytestmark = pytest.mark.usefixtures("need_dry_run")

SPECS: dict[str, tuple[dict[str, object], int]] = {
    "biases": ({"bias": True}, 7),
    "rotary, norms, window": (
        {"bias": False, "rotary": "half", "qk_norm": "rms", "window_left": 511}, 5,
    ),
    "rotary, one head of keys": ({"bias": False, "rotary": "half", "num_kv_heads": 1}, 5),
}  # fmt: skip
"""Fields beside a cache in place and heads of 64, and the most launches of a step."""

TYPES = ("float16", "bfloat16")
DEFAULT = {("rotary, norms, window", "sm_80", "float16"), ("biases", "sm_90", "bfloat16")}


CAPTURE = """
import onnxruntime as ort
from attn_export.parts.cuda_dry_run.dry_run_timeline import read_record

options = ort.SessionOptions()
cuda = ("CUDAExecutionProvider", {"enable_cuda_graph": "1"})
session = ort.InferenceSession(str(path), options, providers=[cuda, "CPUExecutionProvider"])
sizes = {"batch": 2, "capacity": 1024}
types = {"tensor(float16)": np.float16, "tensor(int32)": np.int32}
bound, held = session.io_binding(), {}
for end in (*session.get_inputs(), *session.get_outputs()):
    shape = [sizes.get(size, size) for size in end.shape]
    name = end.name.replace("present", "past")
    if name not in held:
        zeros = np.zeros(shape, types[end.type])
        held[name] = ort.OrtValue.ortvalue_from_numpy(zeros, "cuda", 0)
    if end in session.get_inputs():
        bound.bind_ortvalue_input(end.name, held[name])
    else:
        bound.bind_ortvalue_output(end.name, held[name])
launches = []
for lengths in ([0, 5], [0, 5], [1, 6], [700, 9]):
    held["past_length"].update_inplace(np.array(lengths, np.int32))
    start = record.stat().st_size
    session.run_with_iobinding(bound)
    events = read_record(record, start, record.stat().st_size)
    launches.append(sum(event.kind == "launch" for event in events))
say(launches)
"""


def ran(graph: IrGraph, folder: Path, arch: str, sizes: tuple[int, int, int]) -> Step:
    (card,) = architectures_named([arch])
    found = observe(folder, graph.file, card, sizes)
    assert not found.refused
    assert not [node for node in found.elsewhere if node.is_attention]
    (step,) = found.steps
    assert not step.stopped
    return step


@pytest.mark.parametrize(
    "triple",
    extended(list(product(SPECS, ("sm_80", "sm_90"), TYPES)), DEFAULT.__contains__),
    ids=str,
)
def test_a_step_launches_few_kernels_and_never_waits(triple: tuple[str, ...], tmp_path: Path):
    name, arch, dtype = triple
    fields, most = SPECS[name]
    usual = {"embed_dim": 256, "attn_mask": "none", "cache": "in-place", "dtype": dtype}
    exported = export(Subject.from_spec(small_spec(**(usual | fields))))
    forms = lower(exported.in_bfloat16() if exported.in_bfloat16 else exported.model, CUDA)
    save_graphs({form.file.name: form.model for form in forms.values()}, tmp_path)
    step = ran(forms[DECODE], tmp_path, arch, (2, 1, 1023))
    assert step.attention == ("XQA",)
    assert step.launches <= most
    assert sum("GroupQueryAttention" in e.node for e in step.events if e.kind == "launch") <= 3
    assert step.copied == 0
    assert not step.waits
    assert not step.cache_copies
    assert step.cache_bytes == 0
    assert not [event for event in step.events if event.kind == "on device" and event.node]
    for graph, rows in (("", 2), (PREFILL, 1)):
        prefill = ran(forms[graph], tmp_path, arch, (rows, 256, 0))
        assert ("window" in name and not graph) or "flash attention" in prefill.attention[0]
    assert prefill.cache_bytes == 0


def test_a_step_is_captured_as_a_cuda_graph_whatever_the_lengths(tmp_path: Path):
    usual = {"embed_dim": 256, "attn_mask": "none", "cache": "in-place", "dtype": "float16"}
    forms = lower(export(Subject.from_spec(small_spec(rotary="half", **usual))).model, CUDA)
    save_graphs({forms[DECODE].file.name: forms[DECODE].model}, tmp_path)
    path = tmp_path / forms[DECODE].file.name
    captured, *replayed = over_stand_in(tmp_path, path, CAPTURE)
    assert captured > 0
    assert replayed == [0, 0, 0]  # all is in the recorded graph, lengths are read on the device
