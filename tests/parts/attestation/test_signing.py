"""Signatures of bundles: made offline, checked by key, stated by verify."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Cli, command
from signing_keys import PASSPHRASE, key_folder, signed_bundle, signer_of

from attn_export import verify
from attn_export.bundle.manifest import MANIFEST, SIGNATURE, staging
from attn_export.errors import BundleError, UsageError
from attn_export.parts.attestation.attested import signed_files
from attn_export.parts.attestation.sign import sign


@pytest.fixture
def keys() -> Path:
    """Return a folder with key pairs. Read it."""
    return key_folder()


@pytest.fixture
def signed(bundle: Path, tmp_path: Path) -> Path:
    """Return a signed bundle with one case that may be changed."""
    return Path(shutil.copytree(signed_bundle(bundle), tmp_path / "signed"))


# -- signing and verifying ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["own", "p384", "p521"])
def test_a_bundle_is_signed_and_its_signer_is_named(name, signed, keys):
    said = str(sign(signed, key=keys / f"{name}.pem"))
    assert signer_of(signed, keys / f"{name}.pub.pem") == said
    assert said.startswith("signed by key ")


def test_openssf_tools_accept_the_signature_and_theirs_is_accepted(signed, keys):
    tool = [sys.executable, "-m", "model_signing"]
    where = [str(signed), "--signature", str(signed / SIGNATURE)]
    public, private = str(keys / "own.pub.pem"), str(keys / "own.pem")
    words = [*tool, "verify", "key", *where, "--public_key", public]
    subprocess.run(words, check=True, capture_output=True)
    (signed / SIGNATURE).unlink()
    words = [*tool, "sign", "key", *where, "--private_key", private]
    subprocess.run(words, check=True, capture_output=True)
    assert signer_of(signed, keys / "own.pub.pem").startswith("signed by key ")


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


def test_the_signed_files_run(signed, keys):
    with signed_files(signed, str(keys / "own.pub.pem"), None) as (folder, _):
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
        signer_of(signed, keys / "other.pub.pem")


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
    done = cli("verify", signed, "--trust", keys / name)
    code, said = TRUST_ERRORS[name]
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert said in done.stderr


KEY_ERRORS = {
    "own.pub.pem": "is not a private key in PEM",
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
    assert "signed by" in signer_of(signed, keys / "locked.pub.pem")
    with pytest.raises(UsageError, match="the passphrase is wrong"):
        sign(signed, key=keys / "locked.pem", passphrase=lambda: b"wrong")


@pytest.mark.parametrize(
    ("passphrase", "code", "says"),
    [
        (None, 2, "attn-export: the key has a passphrase; set ATTN_EXPORT_PASSPHRASE, or"),
        ("wrong", 2, "the passphrase is wrong"),
        (PASSPHRASE.decode(), 0, "model.sig: signed by key "),
    ],
)
def test_the_passphrase_is_in_the_environment(passphrase, code, says, signed, keys):
    given = {} if passphrase is None else {"ATTN_EXPORT_PASSPHRASE": passphrase}
    done = subprocess.run(
        command(["sign", signed, "--key", keys / "locked.pem"]), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | given,
    )  # fmt: skip
    assert (done.returncode, done.stdout.count("\n")) == (code, 1)
    assert says in done.stdout


def test_sign_takes_either_a_key_or_an_identity(signed, keys, cli: Cli):
    for options in ((), ("--key", keys / "own.pem", "--sigstore")):
        done = cli("sign", signed, *options)
        assert done.returncode == 2
        assert "sign with either --key PRIVATE.pem or --sigstore" in done.stderr


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
