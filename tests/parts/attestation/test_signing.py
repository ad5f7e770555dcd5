"""Signatures of bundles: made offline, checked by key, stated by verify."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Cli
from model_signing import signing
from signing_keys import key_folder, sign, signed_bundle, signer_of

from attn_export import verify
from attn_export.bundle.manifest import MANIFEST, SIGNATURE, staging
from attn_export.commands.verify import attested
from attn_export.errors import BundleError, UsageError


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
    sign(signed, keys / f"{name}.pem")
    key = hashlib.sha256((keys / f"{name}.pub.pem").read_bytes()).hexdigest()
    assert signer_of(signed, keys / f"{name}.pub.pem") == f"signed by key {key}"


def test_verify_states_the_signature_in_every_output(bundle, keys, cli: Cli, tmp_path):
    signed = Path(shutil.copytree(bundle, tmp_path / "signed"))
    sign(signed, keys / "own.pem")
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
    with attested(signed, str(keys / "own.pub.pem"), None) as (folder, _):
        before = (folder / "model.onnx").read_bytes()
        (signed / "model.onnx").write_bytes(b"changed after the check")
        assert not folder.is_relative_to(signed)
        assert (folder / "model.onnx").read_bytes() == before
    assert not folder.exists()


def test_a_signed_bundle_may_be_built_again_and_is_unsigned_then(signed, keys):
    sign(signed, keys / "other.pem")
    with staging(signed) as stage:
        ignored = shutil.ignore_patterns(SIGNATURE)
        shutil.copytree(signed, stage.folder, dirs_exist_ok=True, ignore=ignored)
        stage.publish()
    with pytest.raises(BundleError, match="unsigned"):
        signer_of(signed, keys / "other.pub.pem")


# -- keys ---------------------------------------------------------------------------------------


NO_KEY = "is no public key on P-256, P-384 or P-521: --trust takes what `openssl pkey -in "
TRUST_ERRORS = {"other.pub.pem": (7, "does not match the provided public key")} | dict.fromkeys(
    ("own.pem", "rsa.pub.pem", "ed25519.pub.pem", "missing.pem", "broken.pem"), (2, NO_KEY)
)


@pytest.mark.parametrize("name", TRUST_ERRORS)
def test_a_key_that_is_not_the_signers_public_one_is_refused(name, signed, keys, cli: Cli):
    done = cli("verify", signed, "--trust", keys / name)
    code, said = TRUST_ERRORS[name]
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert said in done.stderr


def test_a_signature_that_was_made_elsewhere_is_verified(bundle, keys, cli: Cli, tmp_path):
    folder = shutil.copytree(bundle, tmp_path / "bundle")
    signing.Config().use_elliptic_key_signer(private_key=keys / "own.pem").sign(
        folder, tmp_path / "out.sig"
    )
    shutil.copy(tmp_path / "out.sig", folder / "model.sig")
    assert cli("verify", folder, "--trust", keys / "own.pub.pem").returncode == 0


def test_an_identity_needs_an_issuer_and_a_sigstore_signature(signed):
    with pytest.raises(UsageError, match="needs --trust IDENTITY"):
        verify(signed, oidc_issuer="https://accounts.google.com")
    with pytest.raises(BundleError, match=r"not by me@example\.com"):
        verify(signed, trust="me@example.com", oidc_issuer="https://accounts.google.com")


def test_without_the_extra_one_line_names_it(signed, tmp_path):
    hidden = tmp_path / "hidden" / "sitecustomize.py"
    hidden.parent.mkdir()
    hidden.write_text(
        "import importlib.util as u\nreal = u.find_spec\n"
        "u.find_spec = lambda n, *p: None if n == 'model_signing' else real(n, *p)\n"
    )
    code = "from attn_export.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", signed, "--trust", "k"], capture_output=True,
        text=True, env={"PYTHONPATH": str(hidden.parent), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "model_signing is not installed; " in done.stderr
    assert "pip install '.[sign]'" in done.stderr


def test_the_manifest_does_not_list_the_signature(signed):
    assert SIGNATURE not in json.loads((signed / MANIFEST).read_text())["files"]
