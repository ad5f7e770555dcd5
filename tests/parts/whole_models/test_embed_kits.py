"""Kits of encoders of texts: the vectors of their programs are those of the session here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from library_kits import BINDINGS, binding_kit, compile_cpp, program
from native_kits import compile_kit
from shared import once
from test_sentence_models import IDS, built

from attn_export.parts.kits.kit import write_kit
from attn_export.parts.whole_models.embedding import Embedder

KINDS = [("c", "bert"), ("c", "llama"), *((language, "bert") for language in BINDINGS)]
"""Languages, and types of encoders: those of llama pad on the left."""


def kit_of(language: str, kind: str) -> Path:
    def make(kit: Path) -> None:
        write_kit(language, built(kind), kit)
        if language == "c":
            compile_kit(kit, "Debug")
            return
        build = kit_of("c", kind) / "build"
        (kit / "library" / "build").symlink_to(build)
        if language == "csharp":  # Mono looks for the library beside the program
            shutil.copy(binding_kit(language) / "attn.exe", kit)
            shutil.copy(build / "libattn_export.so", kit)
        if language == "cpp":  # whose program knows the folder of the bundle
            folder = f'-DBUNDLE_FOLDER="{kit}/bundle"'
            compile_cpp(kit / "attn.cpp", kit / "attn", build, folder)

    return once(f"kits/{language}-texts-{kind}", make)


def embed(language: str, kind: str, *texts: str) -> subprocess.CompletedProcess[str]:
    kit = kit_of(language, kind)
    own = {"c": ["build/embed"], "cpp": ["./attn", "embed"]}
    library = ["env", f"LD_LIBRARY_PATH={kit / 'library' / 'build'}"]
    words = own[language] if language in own else [*library, *program(language), "embed"]
    return subprocess.run([*words, *texts], cwd=kit, capture_output=True, text=True)


@pytest.mark.parametrize(("language", "kind"), KINDS)
def test_vectors_are_those_of_the_session_in_the_order_of_the_texts(language, kind, need):
    need(language)
    texts = [*IDS, *(ids[: 2 + at % 3] for at, ids in enumerate(IDS * 7))]  # of several batches
    done = embed(language, kind, *(",".join(map(str, ids)) for ids in texts))
    assert (done.returncode, done.stderr) == (0, "")
    found = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
    wanted = Embedder(built(kind), threads=1).of_ids(texts)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("language", ["c", *BINDINGS])
@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["1,2", "1,64"], "input_ids holds 64, expected 0 to 63"),
        (["1,x"], "input_ids holds -1"),
        (["1,2", ""], "text 1 has 0 tokens, expected 1 to 12"),
        ([",".join("1" * 13)], "text 0 has 13 tokens, expected 1 to 12"),
    ],
)
def test_ids_that_the_encoder_does_not_take_are_one_line(language, texts, says, need):
    need(language)
    done = embed(language, "bert", *texts)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr
