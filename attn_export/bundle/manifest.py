"""Reading and writing of bundles. A bundle is replaced in one step, and checked when it is read."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from attn_export.errors import (
    PARAGRAPH,
    AttnExportError,
    BundleError,
    UsageError,
    one_line,
    printable,
)
from attn_export.output_folder import Digests, replaceable, sha256, take_place, write_errors
from attn_export.schema import Manifest, TensorSignature
from attn_export.temp_folders import folder_beside
from attn_export.untrusted_files import checked, parse_json, read_text

if TYPE_CHECKING:
    from attn_export.interface import Shape
    from attn_export.spec import AttentionSpec

MANIFEST = "manifest.json"
SIGNATURE = "model.sig"
"""The file of the detached signature, which the manifest does not list. The tools of OpenSSF expect
this name."""

FORMAT = "attn-export-bundle/4"
_GENERATED = ("format", "files", "digest")
"""The keys of a manifest that `write_manifest` adds."""

GOLDEN = "golden"
REPORT, PAGE = "report.json", "report.html"
SPEC = "spec.toml"


class _Staging:
    """A new folder next to the output, which replaces the output when it is complete."""

    def __init__(self, folder: Path, output: Path) -> None:
        self.folder = folder
        self.output = output

    def publish(self, *, failed: bool = False) -> Path:
        """Replace the output by the new folder; after a failed build, replace `failed_folder`.

        Returns:
            The final folder of the bundle.
        """
        target = _replaceable(failed_folder(self.output) if failed else self.output)
        take_place(self.folder, target)
        return target


def bundles_in(folder: Path) -> dict[str, Path]:
    """Return the bundles in a folder that is none itself, by name; none if it is one."""
    if (folder / MANIFEST).exists():
        return {}
    return {file.parent.name: file.parent for file in sorted(folder.glob(f"*/{MANIFEST}"))}


def refuse_other_graphs(folder: Path) -> None:
    """Raise BundleError if a graph in a bundle, or in a folder of several, is in no manifest.

    Nothing would judge it. What a build that still runs has in a hidden folder is not looked at.
    """
    manifests = {path: read_manifest(path) for path in [*bundles_in(folder).values()] or [folder]}
    there = {*folder.glob("*"), *folder.glob("*/*")}
    there |= {path / name for path, manifest in manifests.items() for name in manifest.files}
    listed = {path / name for path, manifest in manifests.items() for name in manifest.graphs}
    for path in sorted(there - listed):
        is_hidden = path.relative_to(folder).parts[0].startswith(".")
        if path.suffix.lower() in (".onnx", ".ort") and not is_hidden:
            raise BundleError(
                f"{path} is a graph of which no {MANIFEST} says anything, so that nothing judges "
                "it; move it away, or build the bundle again"
            )


def failed_folder(output: Path) -> Path:
    """Return the folder of the bundle that a failed build leaves: ``OUTPUT.failed``."""
    return output.with_name(f"{output.name}.failed")


@contextlib.contextmanager
def staging(output: Path) -> Iterator[_Staging]:
    """Yield a new folder next to `output`, which is removed at the end unless it was published."""
    with write_errors(output):
        output = _replaceable(output)
        _replaceable(failed_folder(output))
        missing = [folder for folder in output.parents if not folder.exists()]
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            with folder_beside(output) as folder:
                yield _Staging(folder, output)
        finally:
            with contextlib.suppress(OSError):  # they hold the bundle
                for folder in missing:
                    folder.rmdir()


def _replaceable(output: Path) -> Path:
    return replaceable(output, "bundle", _digests)


def _digests(folder: Path) -> Digests | None:
    """Return the digests of the files of a bundle, or of several; None if the folder is neither."""
    parts = {name: _digests(path) for name, path in bundles_in(folder).items()}
    if parts and all(parts.values()):
        return {f"{name}/{file}": x for name, of in parts.items() for file, x in (of or {}).items()}
    try:
        digests = {**read_manifest(folder).files, MANIFEST: sha256(folder / MANIFEST)}
        # The signature may be removed with the bundle.
        signature = folder / SIGNATURE
        return digests | ({SIGNATURE: sha256(signature)} if signature.is_file() else {})
    except BundleError:
        return None


def write_manifest(folder: Path, content: Mapping[str, Any]) -> Manifest:
    """Write `manifest.json` with the SHA-256 of every other file. It must be written last.

    `content`: The manifest without the keys in `_GENERATED`. It is not a `Manifest`, because the
    file has its order of keys and lacks the same optional keys.

    Returns:
        The manifest.
    """
    files = {
        path.relative_to(folder).as_posix(): sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    text = _to_text({"format": FORMAT, **content, "files": files})
    try:
        manifest = checked(json.loads(text), Manifest)
    except ValueError as error:
        raise UsageError(f"this cannot be a bundle: {error}; rename the input or output") from error
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read `manifest.json` without checking the other files."""
    _, manifest = _read_manifest(folder)
    return manifest


def manifest_content(folder: Path) -> dict[str, Any]:
    """Return the content of `manifest.json` as `write_manifest` takes it."""
    content, _ = _read_manifest(folder)
    return {key: value for key, value in content.items() if key not in _GENERATED}


def _read_manifest(folder: Path) -> tuple[dict[str, Any], Manifest]:
    """Return the content of `manifest.json` as it is in the file, and as a `Manifest`."""
    path = folder / MANIFEST
    if folder.is_file():
        raise UsageError(f"{folder} is a file; give the folder of the bundle, {folder.parent}")
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a bundle: there is no such folder")
    if several := bundles_in(folder):
        raise BundleError(
            f"{folder} holds several bundles; name one: {printable(', '.join(several), 150)}"
        )
    try:
        text = read_text(path)
        content = parse_json(text)
    except OSError as error:
        raise BundleError(f"{folder} is not a bundle: {path.name}: {error.strerror}") from error
    except ValueError as error:
        raise BundleError(f"{path} was changed: it is not valid JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BundleError(f"{path} is not of the format {FORMAT}; build the bundle again")
    try:
        manifest = checked(content, Manifest)
    except ValueError as error:
        raise BundleError(f"{path} was changed: {error}; build the bundle again") from error
    # The file must be byte for byte what `write_manifest` writes.
    if _to_text(content) != text:
        raise BundleError(f"{path} was changed after it was written; build the bundle again")
    return content, manifest


def read_bundle(folder: Path) -> Manifest:
    """Compare every file of a bundle with its digest, and return the manifest."""
    manifest = read_manifest(folder)
    _refuse_links(folder, manifest.files)
    for name, digest in manifest.files.items():
        try:
            actual = sha256(folder / name)
        except OSError as error:
            raise BundleError(f"{folder / name} cannot be read: {error.strerror}") from error
        if actual != digest:
            raise BundleError(
                f"{folder / name} was changed after the bundle was written; move the bundle away "
                "and build it again"
            )
    return manifest


@contextlib.contextmanager
def refuse_exchange(folder: Path) -> Iterator[None]:
    """Raise an error at the end of the block if the bundle is not the one of its start."""
    before = _identity(folder)
    error: AttnExportError | OSError | None = None
    try:
        yield
    except (AttnExportError, OSError) as raised:
        error = raised
    if _identity(folder) != before:
        raise BundleError(f"{folder} was exchanged while it was read; try again") from error
    if error is not None:
        raise error


def _identity(folder: Path) -> tuple[int, int, str] | None:
    try:
        state = folder.stat()
        return state.st_dev, state.st_ino, sha256(folder / MANIFEST)
    except OSError:
        return None


def spec_text(folder: Path, manifest: Manifest) -> str:
    """Return the text of a bundle's spec; "" if it is of a user's module."""
    try:
        return read_text(folder / SPEC) if SPEC in manifest.files else ""
    except (OSError, ValueError) as error:
        raise BundleError(f"{folder / SPEC} cannot be read: {one_line(error)}") from error


def bundle_spec(folder: Path, manifest: Manifest) -> AttentionSpec | None:
    """Return the spec of a bundle; None if it is of a user's module."""
    from attn_export.spec import AttentionSpec

    return AttentionSpec.from_toml(folder / SPEC) if SPEC in manifest.files else None


def shapes_of(signatures: Mapping[str, TensorSignature]) -> dict[str, Shape]:
    """Return the shapes of inputs or outputs by name."""
    return {name: signature.shape for name, signature in signatures.items()}


def dimensions(ends: Mapping[str, TensorSignature], spec: str = "") -> dict[str, str]:
    """Return for a report texts with the dtype and shape of each input and output, and the spec."""
    unset = ("= false", '= "none"', "= 0")
    lines = [line.replace(" = ", " ") for line in spec.splitlines() if not line.endswith(unset)]
    return {
        **({"spec": printable(", ".join(lines), PARAGRAPH)} if lines else {}),
        **{
            name: f"{end.dtype} [{', '.join(str(axis) or '?' for axis in end.shape)}]"
            for name, end in ends.items()
        },
    }


def _refuse_links(folder: Path, names: Collection[str]) -> None:
    """Raise BundleError if a file, or a folder that contains one, is a symbolic link."""
    folders = {name[:end] for name in names for end, char in enumerate(name) if char == "/"}
    for name in sorted({*names, *folders}):
        if (folder / name).is_symlink():
            raise BundleError(
                f"{folder / name} is a link, and a bundle holds files alone; copy it with cp -rL"
            )


def _to_text(content: Mapping[str, Any]) -> str:
    """Return the text of a manifest; its values may be types of `schema`."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    sorted_text = json.dumps(rest, sort_keys=True, default=to_builtins)
    digest = hashlib.sha256(sorted_text.encode()).hexdigest()
    return json.dumps({**content, "digest": digest}, indent=1, default=to_builtins) + "\n"
