"""Signatures of bundles: made offline, checked by key, and refused after any change."""

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
from attestation.keys import PASSPHRASE, make_key
from conftest import Cli

from attn_export import verify
from attn_export.attestation.signature_file import check_covers, read_signature
from attn_export.attestation.signing_sdk import check_key, sign_with_key
from attn_export.bundle import MANIFEST, SIGNATURE, read_manifest, staging, write_manifest
from attn_export.errors import BundleError, UsageError
from attn_export.jobs.sign import Trust, opened, sign, state_of
from attn_export.output_folder import sha256

LARGE_BYTES = 10_000
"""Changed bytes of each large file in the extended test; small files are changed everywhere."""

SMALL = 10_000
"""The largest size of a small file, in bytes."""


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with key pairs."""
    folder = tmp_path_factory.mktemp("keys")
    for name, kind in {"own": "P-256", "other": "P-256", "p384": "P-384", "p521": "P-521"}.items():
        make_key(folder, name, kind)
    make_key(folder, "locked", "P-256", PASSPHRASE)
    make_key(folder, "rsa", "RSA")
    make_key(folder, "ed25519", "Ed25519")
    return folder


@pytest.fixture(scope="session")
def few_files(bundle: Path, keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a signed bundle with one case, which is quick to copy. Too little to be verified."""
    folder = tmp_path_factory.mktemp("few") / "signed"
    cases = shutil.ignore_patterns("test_data_set_[1-9]*")
    shutil.copytree(bundle, folder, ignore=cases)
    with_digests(folder)
    sign(folder, key=keys / "own.pem")
    return folder


def with_digests(bundle: Path) -> None:
    """Write the manifest of a bundle again, for the files that it has by now."""
    kept = read_manifest(bundle)
    write_manifest(bundle, {k: v for k, v in kept.items() if k not in ("files", "digest")})


@pytest.fixture
def signed(few_files: Path, tmp_path: Path) -> Path:
    """Return a signed bundle with one case that may be changed."""
    return Path(shutil.copytree(few_files, tmp_path / "signed"))


def check(bundle: Path, key: Path) -> str:
    """Check the signature as `verify --trust` does, and return the signer."""
    with opened(bundle, Trust(str(key))) as (_, signature):
        return str(signature)


# -- signing and verifying ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["own", "p384", "p521"])
def test_a_bundle_is_signed_and_its_signer_is_named(name, signed, keys):
    said = str(sign(signed, key=keys / f"{name}.pem"))
    assert check(signed, keys / f"{name}.pub.pem") == said
    assert said.startswith("signed by key ")


def test_openssf_tools_accept_the_signature_and_theirs_is_accepted(signed, keys):
    tool = [sys.executable, "-m", "model_signing"]
    where = [str(signed), "--signature", str(signed / SIGNATURE)]
    public, private = str(keys / "own.pub.pem"), str(keys / "own.pem")
    command = [*tool, "verify", "key", *where, "--public_key", public]
    subprocess.run(command, check=True, capture_output=True)
    (signed / SIGNATURE).unlink()
    command = [*tool, "sign", "key", *where, "--private_key", private]
    subprocess.run(command, check=True, capture_output=True)
    assert check(signed, keys / "own.pub.pem").startswith("signed by key ")


def test_verify_states_the_signature_in_every_output(bundle, keys, cli: Cli, tmp_path):
    signed = shutil.copytree(bundle, tmp_path / "signed")
    sign(signed, key=keys / "own.pem")
    files = {"--json": "r.json", "--junit": "r.xml", "--html": "r.html"}
    outputs = [word for pair in files.items() for word in pair]
    key = keys / "own.pub.pem"
    for place, options, said in (
        (bundle, (), "unsigned"),
        (signed, (), "signature not checked"),
        (signed, ("--trust", key), "signed by key"),
    ):
        done = cli("verify", place, "--runtime", "ort-cpu", *options, *outputs)
        assert done.returncode == 0, done.stderr
        assert f"signature: {said}" in done.stdout
        for name in ("r.xml", "r.html"):
            assert said in (tmp_path / name).read_text()
        signature = json.loads((tmp_path / "r.json").read_text())["signature"]
        state = "verified" if options else said.removeprefix("signature ")
        assert signature["state"] == state


def test_what_runs_is_what_was_signed(signed, keys):
    trust = Trust(str(keys / "own.pub.pem"))
    with opened(signed, trust) as (folder, _):
        before = (folder / "model.onnx").read_bytes()
        (signed / "model.onnx").write_bytes(b"changed after the check")
        assert not folder.is_relative_to(signed)
        assert (folder / "model.onnx").read_bytes() == before
    assert not folder.exists()


def test_a_signed_bundle_may_be_built_again_and_is_unsigned_then(signed, keys):
    sign(signed, key=keys / "other.pem")
    with staging(signed) as stage:
        ignored = shutil.ignore_patterns(SIGNATURE)
        shutil.copytree(signed, stage.folder, dirs_exist_ok=True, ignore=ignored)
        stage.publish()
    with pytest.raises(BundleError, match="unsigned"):
        check(signed, keys / "other.pub.pem")


# -- what is refused ----------------------------------------------------------------------------


def flipped(path: Path, place: int, random_bits: random.Random) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= random_bits.randrange(1, 256)
    path.write_bytes(data)


def files_of(bundle: Path) -> list[Path]:
    return sorted(path for path in bundle.rglob("*") if path.is_file())


def test_a_changed_byte_is_refused(signed: Path, keys: Path):
    chosen, key = random.Random(0), keys / "own.pub.pem"
    paths = [signed / name for name in (MANIFEST, "model.onnx", "report.json", "golden/index.json")]
    for path in [*paths, *[signed / SIGNATURE] * 12]:
        good = path.read_bytes()
        flipped(path, chosen.randrange(len(good)), chosen)
        with pytest.raises(BundleError):
            check(signed, key)
        path.write_bytes(good)
    check(signed, key)


@pytest.mark.extended
def test_every_changed_byte_of_every_file_is_refused(signed: Path, keys: Path, tmp_path: Path):
    """Each file lies alone in a folder, with a signature of its own: that is 100 times as fast."""
    chosen = random.Random(0)
    paths = [path for path in files_of(signed) if path.name != SIGNATURE]
    for number, path in enumerate(paths):
        room = tmp_path / str(number)
        room.mkdir()
        alone = Path(shutil.copyfile(path, room / path.name))
        signature = sign_with_key(room, {alone.name: sha256(alone)}, keys / "own.pem", bytes)
        good = alone.read_bytes()
        small = len(good) <= SMALL
        places = range(len(good)) if small else chosen.sample(range(len(good)), LARGE_BYTES)
        for place in places:
            flipped(alone, place, chosen)
            with pytest.raises(BundleError):
                check_covers(room, signature)
            alone.write_bytes(good)
        check_covers(room, signature)


@pytest.mark.extended
def test_every_changed_byte_of_the_signature_is_refused(signed: Path, keys: Path):
    chosen, key, path = random.Random(0), keys / "own.pub.pem", signed / SIGNATURE
    good = path.read_bytes()
    for place in range(len(good)):
        flipped(path, place, chosen)
        with pytest.raises(BundleError):
            check_key(signed, read_signature(signed), key)
        path.write_bytes(good)
    check_key(signed, read_signature(signed), key)


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


def spaced_signature(bundle: Path) -> None:
    content = json.loads((bundle / SIGNATURE).read_text())
    (bundle / SIGNATURE).write_text(json.dumps(content))


def unused_bits(bundle: Path) -> None:
    """Change a character of base64 in bits that decode to nothing."""
    content = json.loads((bundle / SIGNATURE).read_text())
    content["dsseEnvelope"]["signatures"][0]["sig"] = "QR=="  # decodes as QQ== does
    (bundle / SIGNATURE).write_text(json.dumps(content, separators=(",", ":")))


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
    remove_file: "report.html cannot be read",
    rename_file: "holds page.html",
    exchange_files: "was changed after the bundle was signed",
    link_file: r"report.html \(a link\)",
    link_signature: "model.sig is a link",
    remove_signature: "is unsigned",
    huge_signature: "it has 1073741824 bytes",
    deep_signature: "nested too deep",
    spaced_signature: "was changed after it was written",
    unused_bits: "its base64 was changed",
    doubled_file: "it lists a file twice",
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
    with pytest.raises(BundleError, match="signed"):
        state_of(signed)


def test_a_signature_that_leaves_files_out_is_refused(signed, keys):
    (signed / SIGNATURE).unlink()
    tool = [sys.executable, "-m", "model_signing", "sign", "key", str(signed)]
    options = {
        "--signature": signed / SIGNATURE,
        "--private_key": keys / "own.pem",
        "--ignore-paths": signed / "report.html",
    }
    command = [*tool, *(str(word) for pair in options.items() for word in pair)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(BundleError, match=r"holds report.html, which was not signed"):
        check(signed, keys / "own.pub.pem")


# -- keys ---------------------------------------------------------------------------------------


TRUST_ERRORS = {
    "other.pub.pem": (7, "is signed by key "),
    "own.pem": (2, "holds a private key"),
    "rsa.pub.pem": (2, "is a key of RSA"),
    "missing.pem": (2, "cannot read the key"),
    "broken.pem": (2, "holds no public key in PEM"),
}


@pytest.mark.parametrize("name", TRUST_ERRORS)
def test_a_key_that_is_not_the_signers_public_one_is_refused(name, signed, keys, cli: Cli):
    (keys / "broken.pem").write_text("-----BEGIN PUBLIC KEY-----\nno\n-----END PUBLIC KEY-----\n")
    done = cli("verify", signed, "--trust", keys / name)
    code, said = TRUST_ERRORS[name]
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert said in done.stderr


KEY_ERRORS = {
    "own.pub.pem": "is no private key in PEM",
    "rsa.pem": "is a key of RSA",
    "ed25519.pem": "is a key of Ed25519",
    "missing.pem": "cannot read the key",
    "locked.pem": "the key has a passphrase",
}


@pytest.mark.parametrize("name", KEY_ERRORS)
def test_a_key_that_cannot_sign_is_refused(name, signed, keys):
    before = (signed / SIGNATURE).read_bytes()
    with pytest.raises(UsageError, match=KEY_ERRORS[name]):
        sign(signed, key=keys / name)
    assert (signed / SIGNATURE).read_bytes() == before


def test_a_key_with_a_passphrase_signs(signed, keys):
    sign(signed, key=keys / "locked.pem", passphrase=lambda: PASSPHRASE)
    assert "signed by" in check(signed, keys / "locked.pub.pem")
    with pytest.raises(UsageError, match="the passphrase is wrong"):
        sign(signed, key=keys / "locked.pem", passphrase=lambda: b"wrong")


NOT_WHOLE: dict[Callable[[Path], None], str] = {
    add_file: "holds golden/more.pb, which is not the bundle's",
    add_folder: "holds more, which is not the bundle's",
    link_file: "is a link",
    remove_file: "report.html cannot be read",
    exchange_files: "was changed after the bundle was written",
}


@pytest.mark.parametrize("change", NOT_WHOLE, ids=lambda change: change.__name__)
def test_only_a_whole_bundle_is_signed(change, signed, keys):
    change(signed)
    with pytest.raises(BundleError, match=NOT_WHOLE[change]):
        sign(signed, key=keys / "own.pem")


def test_an_identity_needs_an_issuer_and_a_sigstore_signature(signed):
    with pytest.raises(UsageError, match="needs --trust IDENTITY"):
        verify(signed, oidc_issuer="https://accounts.google.com")
    with pytest.raises(BundleError, match=r"not by me@example\.com"):
        verify(signed, trust="me@example.com", oidc_issuer="https://accounts.google.com")


def test_without_the_extra_one_line_names_it(signed, keys, cli: Cli, tmp_path):
    hidden = tmp_path / "hidden" / "sitecustomize.py"
    hidden.parent.mkdir()
    hidden.write_text(
        "import importlib.util as u\nreal = u.find_spec\n"
        "u.find_spec = lambda n, *p: None if n == 'model_signing' else real(n, *p)\n"
    )
    code = "from attn_export.__main__ import main; main()"
    for words in (("sign", signed, "--key", keys / "own.pem"), ("verify", signed, "--trust", "k")):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True,
            env={"PYTHONPATH": str(hidden.parent), "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert done.returncode == 2
        assert "model_signing is not installed; " in done.stderr
        assert "attn-export[sign]" in done.stderr


def test_the_manifest_does_not_list_the_signature(signed):
    assert SIGNATURE not in json.loads((signed / MANIFEST).read_text())["files"]
