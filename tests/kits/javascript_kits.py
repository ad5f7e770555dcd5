"""Shared parts of the tests of JavaScript kits: a kit set up, a planted fault."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from attn_export.graph.load import load_graph
from attn_export.graph.lower import lower
from attn_export.graph.save import save_graphs
from attn_export.jobs.kit import write_kit
from attn_export.runtimes.install_folder import home
from attn_export.spec import AttentionSpec


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
