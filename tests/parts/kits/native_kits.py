"""Shared parts of the tests of C and C++ kits: kits, and faults to plant in bundles."""

from __future__ import annotations

import json
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


def kit_of(kind: str, name: str) -> Path:
    """Return a kit that was built as its README says, but with warnings as errors."""
    bundle = bundle_of(name)

    def make(kit: Path) -> None:
        # A cache in place is held as the fastest graphs do, one of them for single tokens.
        write_kit(kind, bundle, kit, dialect=None if name == "in-place" else DIALECT)
        # One as users build it; optimising all of them takes a minute.
        compile_kit(kind, kit, "Release" if name == "append" else "Debug")

    return once(f"kits/{kind}-{name}", make)


def compile_kit(kind: str, kit: Path, how: str, flags: str = "") -> None:
    """Build the programs of a kit; a warning is an error."""
    compiler = {"c": "C", "cpp": "CXX"}[kind]
    call(
        "cmake", "-S", ".", "-B", "build", f"-DONNXRUNTIME_ROOT={home() / 'onnxruntime'}",
        f"-DCMAKE_{compiler}_FLAGS=-Werror {flags}", f"-DCMAKE_BUILD_TYPE={how}", cwd=kit,
    )  # fmt: skip
    call("cmake", "--build", "build", cwd=kit)


def compile_and_run(
    kit: Path, kind: str, program: str, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Compile a program with the library that a kit has built, and run it in the kit's folder."""
    compiler, library = {"c": ("cc", "attention_model"), "cpp": ("c++", "attention_cpp_model")}[
        kind
    ]
    source, libraries = folder / f"mine.{kind}", home() / "onnxruntime" / "lib"
    source.write_text(program)
    built = [next((kit / "build").rglob(f"lib{name}.a")) for name in (library, "attention_core")]
    call(
        compiler, "-Wall", "-Wextra", "-Werror", f"-I{kit / 'src'}", f"-I{kit / 'core'}", source,
        *built,
        f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lonnxruntime", "-lm", "-o", folder / "mine",
        cwd=folder,
    )  # fmt: skip
    return subprocess.run([folder / "mine"], cwd=kit, capture_output=True, text=True)


def kit_without_evidence(kind: str) -> Path:
    """Return a kit of a bundle with unusable cases, one of which ignores a missing row."""

    def make(kit: Path) -> None:
        proves = without_evidence(bundle_of("append"), kit.with_name(f"{kit.name}-proves"))
        rows = kit.with_name(f"{kit.name}-rows")
        bundle = rewritten(proves, rows, lambda index: NO_SUCH_ROW(index["cases"][0]))
        write_kit(kind, bundle, kit, DIALECT)
        compile_kit(kind, kit, "Debug")

    return once(f"kits/{kind}-no-evidence", make)


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


def in_truth(edit: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[Path], None]:
    """Return a fault in the first truth of the bundle's first case."""

    def change(bundle: Path) -> None:
        path = bundle / "golden" / "test_data_set_0" / "output_0.pb"
        name, array = read_tensor(path)
        array = array.copy()
        edited = edit(array)
        write_tensor(path, name, array if edited is None else edited)

    return change


def _nan(truth: np.ndarray) -> None:
    truth[0, 0, 0] = np.nan


def _infinity(truth: np.ndarray) -> None:
    truth[0, 0, 3] = -np.inf


def _zero_row(truth: np.ndarray) -> None:
    truth[0, 0] = 0


def _whole(truth: np.ndarray) -> None:
    truth *= 1.01


WRONG_TRUTHS = {
    "NaN or infinity in other places than the truth has them; 1 of": in_truth(_nan),
    "NaN or infinity in other places": in_truth(_infinity),
    "a row that must be 0 is not": in_truth(_zero_row),
    "the whole output, allowed": in_truth(_whole),
}


def _through(operator: str, kind: int, **attributes: int) -> Callable[[Path], None]:
    """Send the graph's first output through one more operator that changes its form."""

    def change(bundle: Path) -> None:
        model = onnx.load(bundle / "model.onnx", load_external_data=False)
        output = model.graph.output[0]
        (node,) = (node for node in model.graph.node if output.name in node.output)
        names = ["before" if name == output.name else name for name in node.output]
        del node.output[:]
        node.output.extend(names)
        model.graph.node.append(
            onnx.helper.make_node(operator, ["before"], [output.name], **attributes)
        )
        output.type.tensor_type.elem_type = kind
        output.type.tensor_type.ClearField("shape")
        onnx.save(model, bundle / "model.onnx")

    return change


WRONG_FORMS = {
    "its shape is [": _through("Transpose", onnx.TensorProto.FLOAT),
    "its type is 11, expected 1": _through(
        "Cast", onnx.TensorProto.DOUBLE, to=onnx.TensorProto.DOUBLE
    ),
}


def one_row(bundle: Path) -> None:
    """Change the smallest row by twice its allowed error, which is small in the whole."""
    cases = json.loads((bundle / "golden" / "index.json").read_text())["cases"]
    case = max(cases, key=lambda c: c["sizes"]["batch"] * c["sizes"]["query_len"])
    path = bundle / "golden" / case["folder"] / "output_0.pb"
    name, array = read_tensor(path)
    rows = array.copy().reshape(-1, array.shape[-1])
    norms = np.linalg.norm(rows, axis=1)
    rows[np.argmin(np.where(norms > 0, norms, np.inf))] *= 1 + 2 * case["allowed"][name]["row"]
    write_tensor(path, name, rows.reshape(array.shape))


def _cut(path: str) -> Callable[[Path], None]:
    def change(bundle: Path) -> None:
        file = bundle / path
        file.write_bytes(file.read_bytes()[:40])

    return change


def _lost(bundle: Path) -> None:
    (bundle / "golden" / "test_data_set_1" / "output_0.pb").unlink()


def _renamed(bundle: Path) -> None:
    path = bundle / "golden" / "test_data_set_0" / "input_0.pb"
    _, array = read_tensor(path)
    write_tensor(path, "somebody_else", array)


def _huge(bundle: Path) -> None:
    """Write a tensor that claims to have 2**62 elements."""
    path = bundle / "golden" / "test_data_set_0" / "input_0.pb"
    path.write_bytes(b"\x08" + b"\x80" * 8 + b"\x40" + path.read_bytes())


DAMAGED = {
    "input_0.pb holds no tensor": _cut("golden/test_data_set_0/input_0.pb"),
    "output_0.pb holds no tensor": _cut("golden/test_data_set_0/output_0.pb"),
    "test_data_set_1/output_0.pb": _lost,
    "holds somebody_else, expected query": _renamed,
    "input_0.pb holds no tensor: ": _huge,
    "output_0.pb: output has the shape [": in_truth(lambda truth: truth[..., :-1]),
    "output_0.pb: output has the type 11, expected 1": in_truth(
        lambda truth: truth.astype(np.float64)
    ),
    "model.onnx": _cut("model.onnx"),
}


def judged(done: subprocess.CompletedProcess[str]) -> Sequence[str]:
    """Return the lines about cases, without the summary."""
    return done.stdout.splitlines()[:-1]
