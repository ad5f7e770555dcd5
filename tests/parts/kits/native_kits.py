"""Shared parts of the tests of kits in C: kits, and faults to plant in bundles."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from evidence import NO_SUCH_ROW, rewritten, without_evidence
from shared import bundle_of, once

from attn_export.parts.installing import home
from attn_export.parts.kits.kit import write_kit
from attn_export.tensorfile import read_tensor, write_tensor

HEAD_DIM = 8
DIALECT = "standard"


def kit_of(name: str) -> Path:
    """Return a kit that was built as its README says, but with warnings as errors."""
    bundle = bundle_of(name)

    def make(kit: Path) -> None:
        # A cache in place is held as the fastest graphs do, one of them for single tokens.
        write_kit("c", bundle, kit, dialect=None if name == "in-place" else DIALECT)
        # One as users build it; optimising all of them takes a minute.
        compile_kit(kit, "Release" if name == "append" else "Debug")

    return once(f"kits/c-{name}", make)


def compile_kit(kit: Path, how: str, flags: str = "") -> None:
    """Build the programs of a kit; a warning is an error."""
    call(
        "cmake", "-S", ".", "-B", "build", f"-DONNXRUNTIME_ROOT={home() / 'onnxruntime'}",
        f"-DCMAKE_C_FLAGS=-Werror {flags}", f"-DCMAKE_BUILD_TYPE={how}", cwd=kit,
    )  # fmt: skip
    call("cmake", "--build", "build", cwd=kit)


def compile_and_run(kit: Path, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Compile a program with the library that a kit has built, and run it in the kit's folder."""
    source = folder / "mine.c"
    source.write_text(program)
    build = kit / "build"
    call(
        "cc", "-Wall", "-Wextra", "-Werror", f"-I{kit / 'src'}", source, f"-L{build}",
        f"-Wl,-rpath,{build}", "-lattn_export", "-o", folder / "mine",
        cwd=folder,
    )  # fmt: skip
    return subprocess.run([folder / "mine"], cwd=kit, capture_output=True, text=True)


def kit_without_evidence() -> Path:
    """Return a kit of a bundle with unusable cases, one of which ignores a missing row."""

    def make(kit: Path) -> None:
        proves = without_evidence(bundle_of("append"), kit.with_name(f"{kit.name}-proves"))
        rows = kit.with_name(f"{kit.name}-rows")
        bundle = rewritten(proves, rows, lambda index: NO_SUCH_ROW(index["cases"][0]))
        write_kit("c", bundle, kit, DIALECT)
        compile_kit(kit, "Debug")

    return once("kits/c-no-evidence", make)


def call(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout


def run(kit: Path, program: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program of a kit, from another folder than its own."""
    command = [kit / "build" / program, *words]
    return subprocess.run([*map(str, command)], cwd="/", capture_output=True, text=True)


def changed(bundle: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    """Return a copy of a bundle with a change."""
    copy = Path(shutil.copytree(bundle, folder / "changed"))
    change(copy)
    return copy


# -- faults: each changes a bundle's folder ----------------------------------------------------


def scale(bundle: Path) -> None:
    """Divide the scale of the attention by the root of head_dim."""
    path = bundle / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    (node,) = (n for n in model.graph.node if n.op_type == "Attention")
    (was,) = [a.f for a in node.attribute if a.name == "scale"] or [1 / math.sqrt(HEAD_DIM)]
    kept = [a for a in node.attribute if a.name != "scale"]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute("scale", was / math.sqrt(HEAD_DIM))])
    onnx.save(model, path)


def in_reference(edit: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[Path], None]:
    """Return a fault in the first reference of the bundle's first case."""

    def change(bundle: Path) -> None:
        path = bundle / "golden" / "test_data_set_0" / "output_0.pb"
        name, array = read_tensor(path)
        array = array.copy()
        edited = edit(array)
        write_tensor(path, name, array if edited is None else edited)

    return change


def transposed(bundle: Path) -> None:
    """Transpose the graph's first output."""
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    output = model.graph.output[0]
    (node,) = (node for node in model.graph.node if output.name in node.output)
    node.output[:] = ["before" if name == output.name else name for name in node.output]
    model.graph.node.append(onnx.helper.make_node("Transpose", ["before"], [output.name]))
    output.type.tensor_type.ClearField("shape")
    onnx.save(model, bundle / "model.onnx")


def _cut(path: str) -> Callable[[Path], None]:
    def change(bundle: Path) -> None:
        file = bundle / path
        file.write_bytes(file.read_bytes()[:40])

    return change


def _renamed(bundle: Path) -> None:
    path = bundle / "golden" / "test_data_set_0" / "input_0.pb"
    _, array = read_tensor(path)
    write_tensor(path, "somebody_else", array)


DAMAGED = {
    "input_0.pb holds no tensor": _cut("golden/test_data_set_0/input_0.pb"),
    "holds somebody_else, expected query": _renamed,
    "output_0.pb: output has the shape [": in_reference(lambda reference: reference[..., :-1]),
    "output_0.pb: output has the type 11, expected 1": in_reference(
        lambda reference: reference.astype(np.float64)
    ),
    "model.onnx": _cut("model.onnx"),
}


def judged(done: subprocess.CompletedProcess[str]) -> Sequence[str]:
    """Return the lines about cases, without the summary."""
    return done.stdout.splitlines()[:-1]
