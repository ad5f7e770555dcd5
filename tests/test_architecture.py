"""Tests of the architecture: stages, allowed imports, and the modules that a command loads."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from package_files import FILES, loaded_by, tree

from attn_export.optional_parts import parts
from attn_export.runtimes.catalogue import packages, runtime

pytestmark = pytest.mark.xdist_group("test_architecture")  # the tests share the parsed files

STAGES = (
    "", "spec", "bundle", "attention", "weights", "graph", "cases", "float64", "export",
    "reference", "runtimes", "judge", "explain", "report", "commands", "parts",
)  # fmt: skip
"""Folders in the order of the way that data goes. A file imports from its own folder and from those
before it; "" has the files beside the folders."""

IF_THERE = {"parts/sweeps": ("parts/cuda_dry_run",)}
"""Parts that use other parts where these are there; without one they say so in one line."""

ENTRANCES = {"__init__", "__main__", "pytest_plugin"}
"""Files beside the folders that import from all of them, and that no other file imports."""

WITH_TORCH = (
    "attention/", "weights/", "user_module", "export/", "reference/float64_mode",
    "reference/decisions", "reference/graph_oracle", "reference/notes", "reference/operations",
    "reference/oracle", "reference/rounding", "reference/ties",
    "parts/attention_operators/fused_kernels", "parts/benchmarks/peers",
    "parts/benchmarks/torch_layers", "parts/linear_attention/called_rules",
    "parts/linear_attention/linear_layer", "parts/probe/pytorch",
    "parts/whole_models/",
)  # fmt: skip

ONLY_IN = {
    "torch": WITH_TORCH,
    "onnxruntime": (
        "runtimes/engines/ort_cpu",
        "runtimes/engines/ort_cuda",
        "parts/benchmarks/own_graphs",
        "runtimes/decode_buffers",
    ),
    "jinja2": ("code_templates", "report/html", "parts/whole_models/chat_template"),
    "onnx.reference": (
        "float64/bounded",
        "float64/contrib_operators",
        "float64/evaluate",
        "graph/ir_helpers",
        "runtimes/engines/onnx_reference",
    ),
    "onnxscript": ("graph/canonical", "graph/fixed_inputs", "export/translations"),
    "onnx_ir": (
        "graph/",
        "export/",
        "commands/bundle_graphs",
        "parts/cuda_dialect/",
        "parts/linear_attention/lower_linear",
        "parts/whole_models/build/rewrites",
        "parts/whole_models/build/quantised_decoder",
        "parts/decomposed/",
    ),
    "safetensors": ("weights/",),
    "transformers": ("parts/whole_models/",),
    "model_signing": ("parts/attestation/attested",),
    "attn_export.attention": (
        "__init__",
        "attention/",
        "export/",
        "reference/float64_mode",
        "parts/",
    ),
    "attn_export.spec": (
        "__init__",
        "spec/",
        "bundle/manifest",
        "attention/",
        "weights/",
        "export/subject",
        "reference/reference",
        "runtimes/decode_session",
        "commands/",
        "parts/",
    ),
    "click": ("commands/", "parts/"),
    "rich": ("commands/", "report/", "parts/"),
    **{
        kind.modules[0].partition(".")[0]: (kind.__module__.partition(".")[2].replace(".", "/"),)
        for kind in map(runtime, packages())
        if hasattr(kind, "modules")
    },
}
"""Prefixes of the files that may import a package, anywhere in the file. What a layer of ours is,
is known where it is read, made and named alone: all others know an interface."""


SHIPPED_IMPORTER = "rule"
"""The file that the Python kit ships beside one that it imports, in a package of another name."""


@functools.cache
def imports(file: str) -> list[str]:
    """Return the dotted names that a file imports, anywhere in it."""
    names = []
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            where = f"{file}, line {node.lineno}: a relative import"
            assert node.level == int(file == SHIPPED_IMPORTER and node.module == "measures"), where
            module = f"attn_export.{node.module}" if node.level else node.module
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def own_imports(file: str) -> set[str]:
    """Return the files of this package that a file imports."""
    found = set()
    for name in imports(file):
        first, *parts = name.split(".")
        if first != "attn_export":
            continue
        # The name itself may be a file, a folder, or something within a file.
        for length in range(len(parts), -1, -1):
            stem = "/".join(parts[:length])
            candidates = (stem, f"{stem}/__init__" if stem else "__init__")
            match = next((c for c in candidates if c in FILES), None)
            if match:
                found.add(match)
                break
    return found


def folder_of(file: str) -> str:
    """Return the folder of a file; each part is one."""
    names = file.split("/")[:-1]
    return "/".join(names[:2] if names[:1] == ["parts"] else names[:1])


def is_in(file: str, places: tuple[str, ...]) -> bool:
    return any(
        file == place or (place.endswith("/") and file.startswith(place)) for place in places
    )


# -- stages -----------------------------------------------------------------------------------


def test_a_file_imports_from_its_folder_and_from_stages_before():
    for file, other in ((f, o) for f in sorted(set(FILES) - ENTRANCES) for o in own_imports(f)):
        here = STAGES.index(folder_of(file).split("/")[0])
        there = STAGES.index(folder_of(other).split("/")[0])
        beside = folder_of(other) in (folder_of(file), "parts", *IF_THERE.get(folder_of(file), ()))
        assert there < here or (there == here and beside), f"{file} imports {other}"


AS_COMMANDS = {"parts/sweeps/tasks"}
"""Files of parts that call commands, beside those that are one: the tasks of sweeps build and
verify."""


def test_a_part_imports_commands_in_the_files_of_its_own_commands_alone():
    """What a part judges, it judges by what a command hands in."""
    commands = {
        module.partition(".")[2].replace(".", "/")
        for part in parts()
        for module in part.commands.values()
    }
    users = {f for f in FILES for o in own_imports(f) if f[:6] == "parts/" and o[:9] == "commands/"}
    assert users - commands == AS_COMMANDS


def test_every_stage_has_files_and_no_file_imports_an_entrance():
    assert {folder_of(file).split("/")[0] for file in FILES} == set(STAGES)
    assert not {other for file in set(FILES) - ENTRANCES for other in own_imports(file)} & ENTRANCES


def test_no_imports_go_in_circles():
    done: set[str] = set()

    def visit(file: str, path: tuple[str, ...]) -> None:
        assert file not in path, " -> ".join((*path, file))
        if file not in done:
            for other in own_imports(file) - {file}:
                visit(other, (*path, file))
            done.add(file)

    for file in FILES:
        # The package's own names are for users; its files import from where they are defined.
        if file != "__init__":
            visit(file, ())


def test_no_file_imports_the_packages_own_names():
    assert [file for file in FILES if "__init__" in own_imports(file)] == []


# -- who imports what -------------------------------------------------------------------------


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_package_is_imported_only_where_it_belongs(package):
    users = {
        file
        for file in FILES
        for name in imports(file)
        if name == package or name.startswith(f"{package}.")
    }
    assert {file for file in users if not is_in(file, ONLY_IN[package])} == set()


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("attn_export", "torch numpy onnx onnx_ir onnxruntime click rich"),
        ("attn_export.commands.main", "torch numpy onnx onnx_ir onnxruntime rich"),
        ("attn_export.commands.verify", "torch numpy onnx onnx_ir onnxruntime rich click"),
        ("attn_export.commands.build", "torch numpy onnx onnx_ir onnxruntime rich click"),
        ("attn_export.commands.check", "torch onnx_ir onnxscript onnxruntime rich"),
        ("attn_export.runtimes.decode_session", "torch onnx onnx_ir onnxruntime rich"),
        ("attn_export.runtimes.catalogue", "torch onnx onnxruntime"),
        ("attn_export.runtimes.child_main", "torch numpy onnx onnxruntime subprocess ctypes"),
        ("attn_export.runtimes.worker", "torch onnx onnxruntime"),
        ("attn_export.parts.cuda_dry_run.dry_run", "torch numpy onnx onnx_ir onnxruntime rich"),
        ("attn_export.parts.probe.probe_command", "torch numpy onnx onnx_ir onnxruntime rich"),
        ("attn_export.parts.probe.run_probes", "torch onnx_ir onnxruntime"),
        ("attn_export.report.terminal", "torch numpy onnx"),
        ("attn_export.judge.replay", "torch onnx onnxruntime"),
        ("attn_export.reference.oracle", "attn_export.weights attn_export.float64.evaluate"),
    ],
)
def test_a_module_starts_without_what_it_does_not_need(module, without):
    assert loaded_by(f"import {module}") & set(without.split()) == set()


def test_no_file_but_those_with_torch_loads_it_in_any_way():
    names = [
        f"attn_export.{file.replace('/', '.')}".removesuffix(".__init__")
        for file in FILES
        if not is_in(file, WITH_TORCH)
    ]
    code = "\n".join(f"import {name}" for name in names)
    assert "torch" not in loaded_by(code)


# -- the commands that have to work without torch ---------------------------------------------


@pytest.fixture
def without_torch(tmp_path) -> Path:
    """Return a folder for PYTHONPATH with a torch whose import writes a file and fails."""
    stub = tmp_path / "path" / "torch"
    stub.mkdir(parents=True)
    trace = f"open({str(tmp_path / 'torch was imported')!r}, 'w').close()"
    (stub / "__init__.py").write_text(f"{trace}\nraise ImportError('no torch here')\n")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"], ["build", "--help"], ["verify", "--help"], ["runtimes"],
        ["check", "model.onnx"], ["verify", ".", "--runtime", "ort-cpu"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_command_works_where_there_is_no_torch(arguments, bundle, without_torch):
    ran = subprocess.run(
        [sys.executable, "-m", "attn_export", *arguments],
        cwd=bundle, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(without_torch / "path")},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert [path.name for path in without_torch.iterdir()] == ["path"]
