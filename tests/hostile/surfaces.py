"""Hostile files of every other kind that commands read: specs, scales, graphs.

Each maker writes what a command reads, with one thing wrong, and returns the command line. Where a
file would be run, its content is refused before: no maker starts a build that goes on to its end.
"""

from __future__ import annotations

import io
import json
import runpy
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from hostile.bundles import Random, damaged, displace, maker, pick
from hostile.checkpoints import NO_BUILD, E
from hostile.values import HOSTILE, changed


@maker
def arrays(bundle: Path, place: Path, random: Random) -> list[str]:
    """Damage a file of arrays."""
    place.mkdir()
    path = place / pick(random, ["x.npz", "x.bin"])
    path.write_bytes(_npz(["query", "past_key"], (1, 4, E), random))
    if random.random() < 0.2:
        displace(path, random)
    return ["range", str(bundle / "model.onnx"), "--inputs", str(path), "--quiet"]


def _npz(names: list[str], shape: tuple[int, ...], random: Random) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", pick(random, [0, 8, 12, 14])) as archive:
        for name in names:
            array = np.full(shape, pick(random, [0.1, np.nan, 0.0, -1.0, np.inf]), "<f4")
            data = io.BytesIO()
            np.save(data, array.astype(pick(random, ["<f4", "<f8", "<i4", "U3", "c8", "?"])))
            content = data.getvalue()
            if random.random() < 0.6:
                content = damaged(content, random)
            archive.writestr(f"{name}{pick(random, ['.npy', '.npy', '', '.x'])}", content)
    content = stream.getvalue()
    return damaged(content, random) if random.random() < 0.3 else content


# -- specs and plans ----------------------------------------------------------------------------

SPEC: dict[str, Any] = {
    "embed_dim": 16, "num_heads": 2, "num_kv_heads": 1, "causal": True,
    "attn_mask": "bool[B,1,1,S]", "cache": "append", "rotary": "half", "rotary_dim": 4,
    "dtype": "float32", "scale": 0.5,
}  # fmt: skip
TOMLS = (
    f"{'a.' * 9000}b = 1", f"embed_dim = 0x{'F' * 9000}", f"a = {'[' * 9000}", f"{'[[spec]]' * 3}",
    "[[spec]]\nnum_heads = [" + "2," * 90_000 + "]\n" + "[[spec]]\nembed_dim = 4\n" * 3,
    "embed_dim = 1979-05-27", "embed_dim = nan", "x = '\\ud800'", "\ufeff", "\x00", "a = 1\na = 1",
    "[a]\n[a]", "a = {b = 1}\na.c = 2", "embed_dim = 1e999", f"x = {{{'a = {' * 300}",
)  # fmt: skip


def toml(value: Any) -> str:
    """Return a value as TOML, which may be none: a text of JSON where it has no literal."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return json.dumps(value)


def write_toml(path: Path, good: dict[str, Any], random: Random) -> None:
    """Write values as TOML, of which one is changed."""
    value = changed(good, random)
    text = (
        "\n".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items())
        if isinstance(value, dict) else toml(value)
    )  # fmt: skip
    text = pick(random, TOMLS) if random.random() < 0.15 else text
    content = text.encode("utf-8", "surrogatepass")
    path.write_bytes(damaged(content, random) if random.random() < 0.15 else content)
    if random.random() < 0.08:
        displace(path, random)


@maker
def spec(bundle: Path, place: Path, random: Random) -> list[str]:
    """Change a value of a spec in TOML."""
    del bundle
    place.mkdir()
    write_toml(place / "s.toml", SPEC, random)
    return ["build", str(place / "s.toml"), *NO_BUILD, "--output", f"{place}.out"]


# -- ONNX files, and files beside them ----------------------------------------------------------


@maker
def no_graph(bundle: Path, place: Path, random: Random) -> list[str]:
    """Give what is no regular file, or a name that no line may show, where a file is read."""
    names = ["m.onnx", "a b.onnx", "$(id).onnx", "a'b.onnx", "a\nb.onnx", "\x1b[31m.onnx",
             "\u202ex.onnx", "-x.onnx", "a;b.onnx", "`id`.onnx", "<b>.onnx"]  # fmt: skip
    place.mkdir()
    path = place / pick(random, names)
    path.write_bytes((bundle / "model.onnx").read_bytes())
    is_whole = random.random() < 0.3
    if not is_whole:
        displace(path, random)
    good = str(bundle / "model.onnx")
    commands = (
        ["check", str(path)],
        ["lower", str(path), "--dialect", "ort", "--output", f"{place}.lowered.onnx"],
        ["verify", str(bundle), "--graph", str(path), "--quiet", "--runtime", "ort-cpu"],
        ["compare", good, str(path), "--quiet", "--runtime", "ort-cpu"],
        ["compare", str(path), good, "--quiet", "--runtime", "ort-cpu"],
        ["dry-run", str(path), "--arch", "sm_80", "--quiet"],
        ["verify", str(bundle), "--baseline", str(path), "--quiet", "--runtime", "ort-cpu"],
        ["build", str(path), *NO_BUILD, "--output", f"{place}.out"],
        ["build", "--module", f"{path}:f", *NO_BUILD, "--output", f"{place}.out"],
        ["build", "--model", str(path), *NO_BUILD, "--output", f"{place}.out"],
        ["sweep", str(path), "--matrix", "github"],
        ["verify", str(bundle), "--trust", str(path), "--quiet"],
        ["verify", str(path), "--quiet"],
        ["kit", "python", str(path), "--output", f"{place}.out", "--quiet"],
        ["explain", str(path), "--runtime", "ort-cpu", "--quiet"],
    )  # fmt: skip
    # A graph that is whole is compared in minutes where others use the processor, too.
    return pick(random, [each for each in commands if not is_whole or each[0] != "compare"])


@maker
def external(bundle: Path, place: Path, random: Random) -> list[str]:
    """Let a graph's weights lie in a file that is none, is missing, cut off or giant."""
    import onnx

    place.mkdir()
    model = onnx.load(bundle / "model.onnx")
    onnx.save_model(
        model, place / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    model = onnx.load(place / "m.onnx", load_external_data=False)
    stored = [t for t in model.graph.initializer if t.data_location == 1]
    if random.random() < 0.5 and stored:
        entry = pick(random, list(pick(random, stored).external_data))
        texts = [v for v in HOSTILE if isinstance(v, str) and "\ud800" not in v]
        entry.value = pick(random, [*texts, "-1", "1e3", str(2**70), "w.bin/../w.bin", "./w.bin"])
        (place / "m.onnx").write_bytes(model.SerializeToString())
    else:
        displace(place / "w.bin", random)
    commands = (
        ["check", str(place / "m.onnx")],
        ["lower", str(place / "m.onnx"), "--dialect", "portable", "--output", f"{place}.l.onnx"],
        ["dry-run", str(place / "m.onnx"), "--arch", "sm_80", "--quiet"],
    )
    return pick(random, commands)


# -- files of parts -----------------------------------------------------------------------------

for _file in sorted(Path(__file__).parents[1].glob("parts/*/hostile_*.py")):
    runpy.run_path(str(_file))
