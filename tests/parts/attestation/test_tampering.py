"""Changes of signed bundles: each is refused, before anything of the bundle is used."""

from __future__ import annotations

import base64
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from signing_keys import key_folder, signed_bundle, signer_of, with_digests

from attn_export import verify
from attn_export.bundle.manifest import MANIFEST, SIGNATURE
from attn_export.commands.verify import attested
from attn_export.errors import BundleError


@pytest.fixture
def keys() -> Path:
    """Return a folder with key pairs. Read it."""
    return key_folder()


@pytest.fixture
def signed(bundle: Path, tmp_path: Path) -> Path:
    """Return a signed bundle with one case that may be changed."""
    return Path(shutil.copytree(signed_bundle(bundle), tmp_path / "signed"))


def flipped(path: Path, place: int, random_bits: random.Random) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= random_bits.randrange(1, 256)
    path.write_bytes(data)


def test_a_changed_byte_is_refused(signed: Path, keys: Path):
    chosen, key = random.Random(0), keys / "own.pub.pem"
    paths = [signed / name for name in (MANIFEST, "model.onnx", "report.json", "golden/index.json")]
    for path in paths:
        good = path.read_bytes()
        flipped(path, chosen.randrange(len(good)), chosen)
        with pytest.raises(BundleError):
            signer_of(signed, key)
        path.write_bytes(good)
    signer_of(signed, key)


def add_file(bundle: Path) -> None:
    (bundle / "golden" / "more.pb").write_bytes(b"")


def add_ignored_file(bundle: Path) -> None:
    (bundle / ".gitattributes").write_text("")


def add_folder(bundle: Path) -> None:
    (bundle / "more").mkdir()


def remove_file(bundle: Path) -> None:
    (bundle / "report.html").unlink()


def rename_file(bundle: Path) -> None:
    (bundle / "report.html").rename(bundle / "page.html")


def exchange_files(bundle: Path) -> None:
    one, other = bundle / "report.html", bundle / "report.json"
    one_text = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(one_text)


def link_file(bundle: Path) -> None:
    (bundle / "report.html").rename(bundle.parent / "elsewhere.html")
    (bundle / "report.html").symlink_to(bundle.parent / "elsewhere.html")


def link_signature(bundle: Path) -> None:
    (bundle / SIGNATURE).rename(bundle.parent / "elsewhere.sig")
    (bundle / SIGNATURE).symlink_to(bundle.parent / "elsewhere.sig")


def remove_signature(bundle: Path) -> None:
    (bundle / SIGNATURE).unlink()


def huge_signature(bundle: Path) -> None:
    with (bundle / SIGNATURE).open("r+b") as file:
        file.truncate(2**30)


def deep_signature(bundle: Path) -> None:
    (bundle / SIGNATURE).write_text("[" * 200_000)


def doubled_file(bundle: Path) -> None:
    """List a file twice, with two digests."""
    content = json.loads((bundle / SIGNATURE).read_text())
    payload = json.loads(base64.b64decode(content["dsseEnvelope"]["payload"]))
    resources = payload["predicate"]["resources"]
    resources.append({**resources[0], "digest": "0" * 64})
    encoded = base64.b64encode(json.dumps(payload).encode()).decode()
    content["dsseEnvelope"]["payload"] = encoded
    (bundle / SIGNATURE).write_text(json.dumps(content, separators=(",", ":")))


def new_manifest(bundle: Path) -> None:
    """Change a file, and every digest of it that needs no key."""
    (bundle / "report.html").write_text("all passed")
    (bundle / SIGNATURE).rename(bundle.parent / SIGNATURE)
    with_digests(bundle)
    (bundle.parent / SIGNATURE).rename(bundle / SIGNATURE)


def forged_statement(bundle: Path) -> None:
    """Take a file out of the bundle and out of the signed list."""
    content = json.loads((bundle / SIGNATURE).read_text())
    payload = json.loads(base64.b64decode(content["dsseEnvelope"]["payload"]))
    resources = payload["predicate"]["resources"]
    payload["predicate"]["resources"] = [r for r in resources if r["name"] != "report.html"]
    encoded = base64.b64encode(json.dumps(payload).encode()).decode()
    content["dsseEnvelope"]["payload"] = encoded
    (bundle / SIGNATURE).write_text(json.dumps(content, separators=(",", ":")))
    (bundle / "report.html").unlink()


CHANGES: dict[Callable[[Path], None], str] = {
    add_file: "holds golden/more.pb, which was not signed",
    add_ignored_file: "holds .gitattributes, which was not signed",
    add_folder: "holds more, which was not signed",
    remove_file: "report.html was changed after the bundle was signed",
    rename_file: "holds page.html",
    exchange_files: "was changed after the bundle was signed",
    link_file: r"report.html \(a link\)",
    link_signature: r"holds model.sig \(a link\)",
    remove_signature: "is unsigned",
    huge_signature: "it has 1073741824 bytes",
    deep_signature: "nested too deep",
    doubled_file: "it lists no file, or one twice",
    new_manifest: "was changed after the bundle was signed",
    forged_statement: "is not genuine",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_bundle_is_refused_before_anything_runs(change, signed, keys):
    change(signed)
    with pytest.raises(BundleError, match=CHANGES[change]):
        verify(signed, trust=keys / "own.pub.pem", runtimes=["ort-cpu"])


@pytest.mark.parametrize("change", [add_file, new_manifest], ids=lambda change: change.__name__)
def test_a_signature_that_does_not_fit_is_refused_without_a_key_too(change, signed):
    change(signed)
    with (
        attested(signed, None, None) as (_, check),
        pytest.raises(BundleError, match="signed"),
    ):
        check()


def test_a_signature_that_leaves_files_out_is_refused(signed, keys):
    (signed / SIGNATURE).unlink()
    tool = [sys.executable, "-m", "model_signing", "sign", "key", str(signed)]
    options = {
        "--signature": signed / SIGNATURE,
        "--private_key": keys / "own.pem",
        "--ignore-paths": signed / "report.html",
    }
    words = [*tool, *(str(word) for pair in options.items() for word in pair)]
    subprocess.run(words, check=True, capture_output=True)
    with pytest.raises(BundleError, match=r"holds report.html, which was not signed"):
        signer_of(signed, keys / "own.pub.pem")
