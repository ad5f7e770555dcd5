"""Shared parts of the tests of JavaScript kits: a kit set up or served, a planted fault, a case."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from attn_export.graph.load import load_graph
from attn_export.graph.lower import lower
from attn_export.graph.save import save_graphs
from attn_export.parts.installing import home
from attn_export.parts.kits.kit import write_kit
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import read_tensors


def kit_of(language: str, bundle: Path, folder: Path, packages: str) -> Path:
    """Write a kit into a folder of its own, with the packages that are installed already."""
    kit = write_kit(language, bundle, folder / "kit")
    (kit / "node_modules").symlink_to(home() / packages / "node_modules")
    return kit


def plant_fault(bundle: Path, spec: AttentionSpec) -> None:
    """Multiply the softmax scale by 1/sqrt(head_dim) in every graph of a bundle."""
    import onnx_ir as ir

    model = load_graph(bundle / "model.onnx")
    (node,) = (node for node in model.graph if node.op_type == "Attention")
    node.attributes.add(ir.AttrFloat32("scale", 1 / spec.head_dim))
    graphs = {"model.onnx": model}
    for dialect in ("portable", "ort"):
        for phase, form in lower(model, dialect).items():
            graphs[".".join(filter(None, ["model", dialect, phase, "onnx"]))] = form.model
    with tempfile.TemporaryDirectory() as folder:  # what is written is still read from
        for name in save_graphs(graphs, Path(folder)):
            shutil.copyfile(Path(folder) / name, bundle / name)


def run(kit: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the kit's folder."""
    return subprocess.run(command, cwd=kit, capture_output=True, text=True, check=False)


@contextmanager
def served(kit: Path) -> Iterator[str]:
    """Yield the kit's address, served as its README says, on a free port."""
    command = ["node", "server.mjs", "0"]
    with subprocess.Popen(command, cwd=kit, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().removeprefix("open ").strip()
        finally:
            server.kill()


def several_queries(bundle: Path) -> tuple[str, int, int, int]:
    """Return a case of one row with a past: its name, queries, keys, and a visible key."""
    index = json.loads((bundle / "golden" / "index.json").read_text())
    case = next(
        case for case in index["cases"]
        if case["kind"] == "shape" and case["sizes"]["batch"] == 1
        and case["sizes"]["past_len"] and case["sizes"]["query_len"] > 1
    )  # fmt: skip
    inputs = read_tensors(bundle / "golden" / case["folder"], "input", index["inputs"])
    sizes = case["sizes"]
    visible = int(np.argmax(inputs["attn_mask"][0, 0, 0, : sizes["past_len"]]))
    return case["name"], sizes["query_len"], sizes["total_len"], visible
