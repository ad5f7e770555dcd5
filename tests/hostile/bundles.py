"""Bundles and graphs that are broken on purpose, and whose digests are made anew."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from hostile.values import HOSTILE, changed

Random = np.random.Generator
Maker = Callable[[Path, Path, Random], list[str]]
"""Makes a file or a folder from a good bundle, and returns the command line that reads it."""

MAKERS: dict[str, Maker] = {}


def maker(make: Maker) -> Maker:
    """Add a maker under its name."""
    MAKERS[make.__name__] = make
    return make


def copied(bundle: Path, place: Path) -> Path:
    """Return a copy of a bundle, of links to its files: one is replaced, and none changed."""
    shutil.copytree(bundle, place, copy_function=os.link)
    return place


def replaced(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of a bundle, and say so in its manifest."""
    file = folder / name
    file.unlink()
    file.write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = hashlib.sha256(content).hexdigest()
    write_sealed(folder, manifest)


def write_sealed(folder: Path, manifest: Any) -> None:
    """Write a manifest with a digest of its own."""
    if isinstance(manifest, dict):
        rest = {key: value for key, value in manifest.items() if key != "digest"}
        digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
        manifest = {**rest, "digest": digest}
    path = folder / "manifest.json"
    path.unlink(missing_ok=True)  # it may be a link to the file of another bundle
    path.write_text(json.dumps(manifest, indent=1) + "\n")


def reader(folder: Path, random: Random) -> list[str]:
    """Return a command that reads a bundle."""
    kit = ["kit", str(random.choice(["c", "cpp", "js", "python", "web"])), str(folder), "--quiet"]
    kit[1] = "node" if kit[1] == "js" else kit[1]
    commands = (
        ["verify", str(folder), "--quiet", "--runtime", "ort-cpu"],
        [*kit, "--output", f"{folder}.kit"],
        ["check", str(folder / "model.onnx")],
    )
    return commands[random.integers(len(commands))]


@maker
def manifest(bundle: Path, place: Path, random: Random) -> list[str]:
    """Change a value of the manifest."""
    copied(bundle, place)
    write_sealed(place, changed(json.loads((place / "manifest.json").read_text()), random))
    return reader(place, random)


@maker
def index(bundle: Path, place: Path, random: Random) -> list[str]:
    """Change a value of the golden index."""
    copied(bundle, place)
    path = place / "golden" / "index.json"
    text = json.dumps(changed(json.loads(path.read_text()), random))
    replaced(place, "golden/index.json", text.encode())
    return reader(place, random)


@maker
def tensors(bundle: Path, place: Path, random: Random) -> list[str]:
    """Change bytes of a golden tensor."""
    copied(bundle, place)
    files = sorted((place / "golden").glob("*/*.pb"))
    file = files[random.integers(len(files))]
    replaced(place, file.relative_to(place).as_posix(), damaged(file.read_bytes(), random))
    return reader(place, random)[:1] and ["verify", str(place), "--quiet", "--runtime", "ort-cpu"]


@maker
def json_text(bundle: Path, place: Path, random: Random) -> list[str]:
    """Replace a JSON file by a text that parsers dislike."""
    copied(bundle, place)
    texts = (
        "[" * 200_000, "{" * 100_000, '{"a":' * 50_000, "9" * 400, "", "null", "1e999", '"\\ud800"',
        "\ufeff{}", "{}" * 10, "[1,", "NaN", "0x10", '{"format": "attn-export-bundle/4"}',
    )  # fmt: skip
    text = texts[random.integers(len(texts))]
    if random.random() < 0.5:
        (place / "manifest.json").unlink()
        (place / "manifest.json").write_text(text)
    else:
        replaced(place, "golden/index.json", text.encode())
    return reader(place, random)


@maker
def no_file(bundle: Path, place: Path, random: Random) -> list[str]:
    """Put a FIFO, a folder, a link or nothing in the place of a file."""
    copied(bundle, place)
    files = [path for path in sorted(place.rglob("*")) if path.is_file()]
    file = files[random.integers(len(files))] if random.random() < 0.5 else place / "manifest.json"
    file.unlink()
    kind = random.integers(5)
    if kind == 0:
        os.mkfifo(file)
    elif kind == 1:
        file.mkdir()
    elif kind == 2:
        file.symlink_to("/dev/zero")
    elif kind == 3:
        file.symlink_to("/etc/hostname")
    return reader(place, random)


PUBLIC_KEY = """\
-----BEGIN PUBLIC KEY-----
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEljQPNlHeoq3OjHl9INv91UESdIav
XFi0kmZFjdVOEDrFm1/Ko83HmqEQ28uP7xsS7TzLFQL3VoAMj+U69jp+rw==
-----END PUBLIC KEY-----
"""


@maker
def signature(bundle: Path, place: Path, random: Random) -> list[str]:
    """Change a value of a signature, or of the statement in it."""
    copied(bundle, place)
    files = json.loads((place / "manifest.json").read_text())["files"]
    resources = [{"name": n, "algorithm": "sha256", "digest": files[n]} for n in list(files)[:5]]
    options = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
    payload = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "bundle", "digest": {"sha256": "0" * 64}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {"resources": resources, "serialization": options},
    }
    payload = changed(payload, random) if random.random() < 0.5 else payload
    encoded = base64.b64encode(json.dumps(payload).encode()).decode()
    kind = "application/vnd.in-toto+json"
    envelope = {"payload": encoded, "payloadType": kind, "signatures": [{"sig": "AAAA"}]}
    hint = hashlib.sha256(PUBLIC_KEY.encode()).hexdigest()
    material = {"publicKey": {"hint": hint}, "tlogEntries": []}
    content = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": material,
        "dsseEnvelope": envelope,
    }
    content = changed(content, random) if random.random() < 0.5 else content
    (place / "model.sig").unlink(missing_ok=True)  # it may be a link, too
    (place / "model.sig").write_text(json.dumps(content, separators=(",", ":")))
    key = place.with_name("public.pem")
    key.write_text(PUBLIC_KEY)
    return ["verify", str(place), "--quiet", "--runtime", "ort-cpu", "--trust", str(key)]


@maker
def baseline(bundle: Path, place: Path, random: Random) -> list[str]:
    """Change a value of a baseline."""
    place.mkdir()
    good = {"format": "attn-export-baseline/1", "versions": {"ort-cpu/model.onnx": "1"},
            "errors": {"ort-cpu/model.onnx": {"base/output": 0.5}}}  # fmt: skip
    (place / "b.json").write_text(json.dumps(changed(good, random)))
    return ["verify", str(bundle), "--quiet", "--runtime", "ort-cpu", "--baseline",
            str(place / "b.json")]  # fmt: skip


@maker
def graph(bundle: Path, place: Path, random: Random) -> list[str]:
    """Change a field of an ONNX file, or bytes of it."""
    place.mkdir()
    model = onnx.load(bundle / "model.onnx")
    content = model.SerializeToString()
    if random.random() < 0.7:
        changed_message(model, random)
        content = model.SerializeToString()
    else:
        content = damaged(content, random)
    path = place / "changed.onnx"
    path.write_bytes(content)
    commands = (
        ["check", str(path)],
        ["lower", str(path), "--dialect", str(random.choice(["standard", "portable", "ort"])),
         "--output", str(place / "out.onnx")],
        ["verify", str(bundle), "--graph", str(path), "--quiet", "--runtime", "ort-cpu"],
        ["compare", str(bundle / "model.onnx"), str(path), "--quiet", "--runtime", "ort-cpu"],
    )  # fmt: skip
    return commands[random.choice(4, p=[0.35, 0.4, 0.1, 0.15])]


def damaged(content: bytes, random: Random) -> bytes:
    """Return bytes with some changed, dropped, repeated, or cut off."""
    data = bytearray(content)
    for _ in range(int(random.integers(1, 4))):
        at = int(random.integers(max(len(data), 1)))
        # The bytes that describe the rest are at the start.
        at = at if random.random() < 0.5 else at % 64
        kind = random.integers(5)
        if kind == 0 and data:
            data[at] ^= 1 << int(random.integers(8))
        elif kind == 1:
            data[at : at + 1] = random.bytes(int(random.integers(1, 9)))
        elif kind == 2:
            del data[at : at + int(random.integers(1, 40))]
        elif kind == 3:
            data[at:at] = data[at : at + int(random.integers(1, 40))]
        else:
            del data[at:]
    return bytes(data)


def changed_message(message: Any, random: Random) -> None:
    """Change one field somewhere within a protobuf message."""
    fields = message.ListFields()
    if not fields:
        return
    field, value = fields[random.integers(len(fields))]
    repeated = not isinstance(value, (int, float, str, bytes)) and hasattr(value, "append")
    if field.message_type is not None:
        inner = value[random.integers(len(value))] if hasattr(value, "add") else value
        kind = random.random()
        if hasattr(value, "add") and kind < 0.15:
            del value[int(random.integers(len(value)))]
        elif hasattr(value, "add") and kind < 0.25:
            value.add().CopyFrom(inner)
        elif kind < 0.3:
            message.ClearField(field.name)
        else:
            changed_message(inner, random)
        return
    new = _of_field(field, random)
    try:
        if repeated:
            value[int(random.integers(len(value)))] = new
        else:
            setattr(message, field.name, new)
    except (TypeError, ValueError):
        message.ClearField(field.name)


def _of_field(field: Any, random: Random) -> Any:
    if field.cpp_type == field.CPPTYPE_STRING:
        texts = [each for each in HOSTILE if isinstance(each, str) and "\ud800" not in each]
        text = texts[random.integers(len(texts))]
        return text.encode() if field.type == field.TYPE_BYTES else text
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return float(random.choice([np.nan, np.inf, -1.0, 0.0, 1e30]))
    return int(random.choice([-1, 0, 1, 2, 7, 100, 2**31 - 1, -(2**31)]))


GIANT = 2**40


def pick(random: Random, choices: Any) -> Any:
    """Return one of some choices, in the type that it has."""
    return choices[int(random.integers(len(choices)))]


def displace(file: Path, random: Random) -> None:
    """Put something that is no plain file in the place of a file, or make it giant or short."""
    content = file.read_bytes() if file.is_file() else b""
    file.unlink(missing_ok=True)
    kinds: list[Callable[[], object]] = [
        lambda: os.mkfifo(file), file.mkdir, lambda: file.symlink_to("/dev/zero"),
        lambda: file.symlink_to("none"), lambda: file.symlink_to(file.name),
        lambda: file.symlink_to("/dev/stdin"), lambda: None,
        lambda: file.write_bytes(content[: len(content) // 2]), lambda: file.write_bytes(b""),
        lambda: (file.write_bytes(content), os.truncate(file, GIANT)),
    ]  # fmt: skip
    pick(random, kinds)()


def made(bundle: Path, place: Path, number: int, kinds: list[str]) -> tuple[str, list[str]]:
    """Return the kind of a hostile input and the command that reads it.

    Args:
        bundle: A good bundle.
        place: The folder or the file to make.
        number: Of the input: each is another one.
        kinds: The kinds to take in turn.
    """
    kind = kinds[number % len(kinds)]
    random = np.random.default_rng([number, *kind.encode()])
    return kind, MAKERS[kind](bundle, place, random)


def all_kinds() -> Iterator[str]:
    """Yield the names of all makers."""
    yield from MAKERS
