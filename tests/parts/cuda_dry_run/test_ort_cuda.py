"""`ort-cuda`'s own code in the real provider over the stand-in: all of it that needs no numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import shared
from conftest import ROOT
from test_dry_run import HALF, OF_CACHE, SINGLE, grouped, standard

from attn_export.parts.cuda_dry_run.install_cuda_stand_in import CUDA_STAND_IN
from attn_export.parts.installing import home

pytestmark = pytest.mark.usefixtures("need_dry_run")

START = """
import json, sys
from pathlib import Path
import numpy as np
from attn_export.parts.cuda_dry_run.dry_run_results import architectures_named
from attn_export.parts.cuda_dry_run.dry_run_session import load_stand_in
from attn_export.runtimes.engines.ort_cuda import OrtCuda

record = Path(sys.argv[2])
load_stand_in(*architectures_named(["sm_80"]), record)
path = Path(sys.argv[1])

def say(value):
    print(json.dumps(value))
"""


def over_stand_in(tmp_path, path, code):
    """Return what a process with the stand-in says of a graph or bundle."""
    command = [sys.executable, "-c", START + code, str(path), str(tmp_path / "record")]
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(home() / CUDA_STAND_IN),
        "PYTHONPATH": str(ROOT),
    }
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(("options", "tf32"), [({}, False), ({"use_tf32": "1"}, True)])
def test_tf32_is_off_unless_it_is_an_option(tmp_path, options, tf32):
    path = standard(tmp_path / "model.onnx", SINGLE)
    facts = over_stand_in(tmp_path, path, f"say(OrtCuda().load(path, 1, {options}).facts())")
    assert facts["tf32"] is tf32
    assert facts["providers"] == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert facts["nodes"]["CUDAExecutionProvider"]["Attention"] == 1


@pytest.mark.parametrize(
    ("dtype", "objection"),
    [
        (HALF, ""),
        (SINGLE, "attention did not run on CUDA: GroupQueryAttention on CPUExecutionProvider"),
    ],
)
def test_attention_that_falls_to_the_cpu_is_objected_to(tmp_path, dtype, objection):
    path = grouped(tmp_path / "model.onnx", dtype)
    assert over_stand_in(tmp_path, path, "say(OrtCuda().load(path, 1).objection())") == objection


RUN = """
inputs = {
    "query": np.ones((2, 1, 1024), np.float16), "key": np.ones((2, 1, 256), np.float16),
    "value": np.ones((2, 1, 256), np.float16), "past_key": np.ones((2, 4, 128, 64), np.float16),
    "past_value": np.ones((2, 4, 128, 64), np.float16), "lengths": np.full(2, 100, np.int32),
    "total": np.full(1, 101, np.int32),
}
engine = OrtCuda().load(path, 1)
engine.run(inputs, BOUND)
before = record.stat().st_size
outputs = engine.run(inputs, BOUND)
events = record.read_text()[before:].splitlines()
say([{n: list(a.shape) for n, a in outputs.items()}, [e.split("\\t")[1:] for e in events]])
"""


def test_a_cache_bound_in_place_is_neither_copied_nor_computed_on_the_host(tmp_path):
    path = grouped(tmp_path / "model.onnx")
    bound = {f"present_{kind}": f"past_{kind}" for _, kind in OF_CACHE[:2]}
    shapes, events = over_stand_in(tmp_path, path, RUN.replace("BOUND", repr(bound)))
    assert shapes == {
        "output": [2, 1, 1024], "present_key": [2, 4, 128, 64], "present_value": [2, 4, 128, 64]
    }  # fmt: skip
    on_device = [int(size) for kind, size, _ in events if kind == "on device"]
    assert on_device == []
    assert sum("Concat" in name for kind, _, name in events if kind == "launch") == 0
    # The same run without the binding has to copy the past: the test can fail.
    _, unbound = over_stand_in(tmp_path, path, RUN.replace("BOUND", "{}"))
    assert [e[2] for e in unbound if e[0] == "launch"] != [e[2] for e in events if e[0] == "launch"]


def test_a_refusal_is_the_text_of_the_provider(tmp_path):
    path = grouped(tmp_path / "model.onnx")
    code = RUN.replace("2, 1,", "2, 3,").replace("BOUND", "{}").replace("engine.run", "attempt")
    attempt = """
def attempt(inputs, bound):
    try:
        return OrtCuda().load(path, 1).run(inputs, bound)
    except Exception as error:
        say(str(error))
        raise SystemExit(0)
"""
    said = over_stand_in(tmp_path, path, attempt + code)
    assert "batch_size must be 1 when sequence_length > 1 and past context is given" in said


DECODE = """
from attn_export.runtimes import decode_buffers, decode_session
guard = decode_buffers.no_cuda_device()
decode_buffers.no_cuda_device = lambda: ""
session = decode_session.DecodeSession(path, device="cuda", block=8)
E = session._state._manifest.inputs["query"].shape[-1]
dtype = session._state._manifest.inputs["query"].dtype
POSITIONS = lambda L: {"position_ids": np.tile(np.arange(L), (2, 1))}
session.prefill(np.ones((2, 7, E), dtype), **POSITIONS(7))
before = record.stat().st_size
session.step(np.ones((2, 1, E), dtype), **POSITIONS(1))
step = [line.split("\\t")[1:] for line in record.read_text()[before:].splitlines()]
session.step(np.ones((2, 1, E), dtype), **POSITIONS(1))
session.reorder([1, 0, 0])
values = {name: value.device_name() for name, value in session._state.caches.values.items()}
cache = next(iter(session._state.caches.values.values()))
say([guard, values, session.lengths.tolist(), session.capacity, step,
     cache.tensor_size_in_bytes()])
"""


def test_a_decode_keeps_its_cache_on_the_device(tmp_path):
    folder = shared.bundle_of("in-place")
    guard, devices, lengths, capacity, step, size = over_stand_in(tmp_path, folder, DECODE)
    assert devices == {"past_key": "cuda", "past_value": "cuda"}
    assert (lengths, capacity) == ([9, 9, 9], 16)
    moved = [int(n) for kind, n, _ in step if kind in ("to device", "to host")]
    assert max(moved) < size, "a step moved a whole cache"
    assert "the stand-in of dry runs" in guard


BUFFERS = """
from attn_export.runtimes.decode_buffers import Caches
from attn_export.runtimes.engines.ort_cpu import array_of
from attn_export.tensorfile import numpy_dtype
engine = OrtCuda().load(path, 1)  # which brings the provider in
axes = {"past_key": ("batch", "capacity", 3)}
caches = Caches(axes, numpy_dtype(DTYPE), 2, 1, "cuda")
caches.write("past_key", np.array([[[1, 2, 3]], [[4, 5, 6]]], numpy_dtype(DTYPE)))
caches.grow(2)
caches = caches.rows(np.array([1, 0, 0]))
value = caches.values["past_key"]
say([value.device_name(), value.data_type(), array_of(value).astype(float).tolist()])
"""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cache_on_the_device_is_of_its_type(tmp_path, dtype):
    path = grouped(tmp_path / "model.onnx")
    device, kind, held = over_stand_in(tmp_path, path, BUFFERS.replace("DTYPE", repr(dtype)))
    assert (device, kind) == ("cuda", f"tensor({dtype})")
    first, second, none = [1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [0.0] * 3
    assert held == [[second, none], [first, none], [first, none]]


def test_the_stand_in_is_no_device(cli):
    place = str(home() / CUDA_STAND_IN)
    ran = subprocess.run(
        [sys.executable, "-m", "attn_export", "runtimes"],
        capture_output=True, text=True, check=True, env=os.environ | {"LD_LIBRARY_PATH": place},
    )  # fmt: skip
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("ort-cuda"))
    assert "unavailable: libcuda.so.1 is the stand-in of dry runs" in line
