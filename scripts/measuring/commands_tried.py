"""Commands tried on bundles and folders that are good, wrong, damaged and old."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import multiprocessing
import shutil
import tarfile
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from hostile.bundles import replaced, write_sealed

ROOT = Path(__file__).resolve().parents[2]
OLD = ROOT / "tests" / "old_bundles"
LLAMA = ROOT / "tests" / "parts" / "whole_models" / "exports" / "llama"
SMALL = "--embed-dim 4 --num-heads 1 --runtime ort-cpu --dialect standard --quiet"

SECONDS = 300
"""The time after which a command hangs."""

Change = Callable[[Path], object]


def few_sizes() -> None:
    """Give builds and comparisons few cases: all take ten times as long."""
    from attn_export.cases import blocks
    from attn_export.parts.whole_models import model_cases, model_reference

    blocks.BLOCKS, blocks.FAR_CALLS = (8,), ()
    model_cases.SIZES, model_reference.MOST = (1, 9), 24  # type: ignore[assignment,misc]


def small_bundle() -> Path:
    """Return a bundle that this version builds, made once for all processes."""
    from conftest import small_spec
    from shared import once

    from attn_export import build
    from attn_export.runtimes.run_options import RunOptions

    def make(folder: Path) -> None:
        run, dialects = RunOptions.of(runtimes=["ort-cpu"]), ["standard"]
        assert build(small_spec(), folder, run, name="small", dialects=dialects).passed

    return Path(once("behaviour/small", make))


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def text(name: str, content: str) -> Change:
    """Put a text in the place of a file."""

    def put(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).write_text(content)

    return put


def cut(name: str) -> Change:
    """Leave out the end of a file, of which the manifest has the digest."""
    return lambda folder: replaced(folder, name, (folder / name).read_bytes()[:-1000])


def stated(**values: object) -> Change:
    """Change values of the manifest, and seal it."""
    return lambda folder: write_sealed(
        folder, {**json.loads((folder / "manifest.json").read_text()), **values}
    )


def wrong_graph(folder: Path) -> None:
    """Give the graph another scale, and the manifest its digest."""
    import onnx
    from graph_faults import scale_times
    from graph_surgery import Graph

    graph = Graph(onnx.load(folder / "model.onnx"))
    scale_times(1.5)(graph)
    replaced(folder, "model.onnx", graph.model.SerializeToString())


def wrong_weight(folder: Path) -> None:
    """Change the sign of a weight, and give the manifest the digest."""
    content = bytearray((folder / "weights.safetensors").read_bytes())
    content[-1] ^= 0x80
    replaced(folder, "weights.safetensors", bytes(content))


def changed_byte(folder: Path) -> None:
    """Change a byte of a golden tensor, of which the manifest keeps the digest."""
    path = min((folder / "golden").rglob("*.pb"))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def moved(folder: Path) -> None:
    """Move the bundle one folder down."""
    shutil.move(folder, f"{folder}.moved")
    folder.mkdir()
    shutil.move(f"{folder}.moved", folder / "inner")


CHANGES: dict[str, Change] = {
    "good": lambda _: None,
    "of format 3": stated(format="attn-export-bundle/3"),
    "another name": stated(name="../x"),
    "no graphs": stated(graphs={}),
    "wrong graph": wrong_graph,
    "changed byte": changed_byte,
    "no manifest": without("manifest.json"),
    "no graph": without("model.onnx"),
    "no golden index": without("golden/index.json"),
    "a list as manifest": text("manifest.json", "[]"),
    "no JSON as manifest": text("manifest.json", "{"),
    "cut graph": cut("model.onnx"),
    "graph of no manifest": lambda folder: shutil.copy(folder / "model.onnx", folder / "b.onnx"),
    "a folder within": moved,
}
"""What is done to a small bundle."""

OF_WEIGHTS: dict[str, Change] = {
    "wrong weight": wrong_weight,
    "no weights": without("weights.safetensors"),
    "cut weights": cut("weights.safetensors"),
}
"""What is done to a bundle whose weights are in a file of their own."""


def changed(change: Change, place: Path) -> Path:
    shutil.copytree(small_bundle(), place)
    change(place)
    return place


def old(name: str, place: Path) -> Path:
    """Unpack a bundle that an older version wrote."""
    with tarfile.open(OLD / name) as archive:
        archive.extractall(place, filter="data")
    return place


def of_weights(change: Change, place: Path) -> Path:
    change(old("0.2.0-whole-model.tar.xz", place))
    return place


def empty(place: Path) -> Path:
    place.mkdir()
    return place


def file(place: Path) -> Path:
    place.write_text("x")
    return place


FOLDERS: dict[str, Callable[[Path], Path]] = {
    **{name: functools.partial(changed, change) for name, change in CHANGES.items()},
    **{name: functools.partial(of_weights, change) for name, change in OF_WEIGHTS.items()},
    **{path.name[:-7]: functools.partial(old, path.name) for path in sorted(OLD.glob("*.xz"))},
    "empty folder": empty,
    "no such path": lambda place: place,
    "a file": file,
    "a checkpoint": lambda _: LLAMA / "checkpoint",
    "an export": lambda _: LLAMA / "genai",
}
"""Subjects of commands, each made at a place or found elsewhere."""

OF_A_FOLDER = (
    "verify BUNDLE --runtime ort-cpu", "verify BUNDLE --runtime ort-cpu --recompute --quiet",
    "check GRAPH", "explain BUNDLE --runtime ort-cpu",
    "kit python BUNDLE --output OUT --quiet",
    "lower GRAPH --dialect ort --output OUT.onnx",
    "range BUNDLE --quiet", "generate BUNDLE --ids 1,2 --count 2 --threads 1",
    "compare GRAPH GRAPH --runtime ort-cpu --quiet",
    "build --model BUNDLE --runtime ort-cpu --quiet --output OUT",
)  # fmt: skip

COMMANDS = (
    "bench", "bisect", "build", "check", "compare", "dry-run", "explain", "generate", "kit",
    "lower", "probe", "range", "runtimes", "sweep", "verify", "worker",
)  # fmt: skip
ALONE = (
    "", "--help", "--version", "nonsense", "bui",
    *(f"{command} --help" for command in COMMANDS),
    *(f"{command} --nonsense" for command in COMMANDS),
    *(command for command in COMMANDS if command not in ("runtimes", "build")),
    f"build {SMALL} --causal --output OUT", f"build {SMALL} --num-heads 3 --output OUT",
    f"build {SMALL} --num-kv-heads 2 --output OUT", f"build {SMALL} --cache paged --output OUT",
    f"build {SMALL} --dtype int8 --output OUT", f"build {SMALL} --kv-dtype int8 --output OUT",
    f"build {SMALL} --output {LLAMA}", f"build {SMALL} --runtime nonsense --output OUT",
    "build --variant nonsense", "build nothing.toml", "build --module nothing.py:f --output OUT",
    "build --model nothing --output OUT", "build --weights nothing --output OUT", "tune nothing",
    f"compare --model {LLAMA}/checkpoint --graphs {LLAMA}/checkpoint",
    f"compare --model {LLAMA}/checkpoint --graphs nothing",
    f"compare --model {LLAMA}/checkpoint --graphs {LLAMA}/genai --layout nonsense",
    "kit cobol nothing --output OUT", "probe nonsense", "verify nothing --runtime nonsense",
)  # fmt: skip


def names() -> list[str]:
    """Return all commands on all folders, and those that need none."""
    of_folders = [f"{words} | {folder}" for folder in FOLDERS for words in OF_A_FOLDER]
    return [*of_folders, *(words.replace(str(ROOT), "ROOT") for words in ALONE)]


def run(name: str, scratch: Path) -> tuple[int | str, str, str]:
    """Return the exit code of a command, or how it ended its process, and what it prints."""
    words, _, folder = name.replace("ROOT", str(ROOT)).partition(" | ")
    bundle = FOLDERS[folder](scratch / "bundle") if folder else scratch
    graph = next(iter(sorted(bundle.glob("*.onnx"))), bundle / "model.onnx")
    stand_for = {"GRAPH": graph, "BUNDLE": bundle, "OUT": scratch / "out"}
    given = functools.reduce(
        lambda x, name: x.replace(name, str(stand_for[name])), stand_for, words
    )
    pipe = _served()
    pipe.send((given.split(), scratch))
    try:
        if pipe.poll(SECONDS):
            answer: tuple[int, str, str] = pipe.recv()
            return answer
    except EOFError:
        return _ended("crash")
    return _ended("hang")


def _ended(how: str) -> tuple[str, str, str]:
    for process in multiprocessing.active_children():
        process.kill()
    _served.cache_clear()
    return how, "", ""


@functools.cache
def _served() -> Connection:
    """Start the process that runs the commands of this one: importing anew takes most time."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    context.Process(target=_serve, args=(its,), daemon=True).start()
    its.close()
    return mine


def _serve(pipe: Connection) -> None:
    from attn_export.commands.main import run as run_command

    few_sizes()
    while True:
        words, folder = pipe.recv()
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(folder), contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err), warnings.catch_warnings(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            code = run_command(words)
        pipe.send((code, out.getvalue(), err.getvalue()))
