"""The C library with an encoder-decoder: the tokens of its program are those of `generate`."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tiny_decoders
from library_kits import CallError, Library, fuzzed
from native_kits import compile_kit
from shared import extended, once
from test_generate_pairs import COUNT, PROMPTS, pair, wanted_of
from test_native_kits import need_sanitizers, sanitized_kit
from test_sentence_models import built

from attn_export.errors import UsageError
from attn_export.parts.kits.kit import LANGUAGES, write_kit


@pytest.fixture(autouse=True)
def _here(need) -> None:
    need("c")


def kit_of(kind: str) -> Path:
    def make(kit: Path) -> None:
        write_kit("c", pair(kind), kit)
        compile_kit(kit, "Debug")

    return once(f"kits/c-pair-{kind}", make)


def run(kit: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([kit / "build" / program, *words], capture_output=True, text=True)


@pytest.mark.parametrize("kind", extended(["t5", "bart"], lambda one: one == "t5"))
def test_tokens_of_texts_are_those_of_transformers(kind):
    import torch

    kit = kit_of(kind)
    assert run(kit, "self_test").returncode == 0
    for prompt in PROMPTS:
        done = run(kit, "generate", ",".join(map(str, prompt)), str(COUNT))
        assert done.stderr == ""
        assert [[*map(int, done.stdout.split())]] == wanted_of(
            kind, {}, input_ids=torch.tensor([prompt])
        )


def test_tokens_of_features_are_those_of_transformers():
    import torch

    kit = kit_of("whisper")
    features = np.random.default_rng(3).standard_normal((1, 8, 24), np.float32)
    library = Library(kit)
    with library.open() as bundle:
        session = library.made("session", bundle)
        value = library.value(features)
        for count, says in ((2, "the encoder takes 1 input"), (0, "the encoder takes 1 input")):
            with pytest.raises(CallError, match=says):
                library.call("encode", session, ctypes.byref(value), count)
        library.call("encode", session, ctypes.byref(value), 1)
        start = np.array([library.get(bundle, 8)])
        library.call("start", session, ctypes.c_void_p(start.ctypes.data), 1, COUNT)
        token, found = ctypes.c_int64(), []
        with contextlib.suppress(CallError):  # after the last one
            while True:
                library.call("next", session, ctypes.byref(token))
                found.append(token.value)
    assert found == wanted_of("whisper", {}, input_features=torch.tensor(features))[0]


def test_what_the_encoder_does_not_take_is_one_line():
    for words, says in ((["1,64"], "there is no token 64"), (["1,x"], "there is no token -1")):
        done = run(kit_of("t5"), "generate", *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert says in done.stderr


@pytest.mark.parametrize("kind", ["pair", "model", "texts", "texts-padded-left"])
def test_calls_at_random_are_no_crash(kind, tmp_path, request):
    need_sanitizers(request, tmp_path)
    bundles = {"pair": lambda: pair("t5"), "model": lambda: tiny_decoders.built("mistral")}
    bundles |= {"texts": lambda: built("bert"), "texts-padded-left": lambda: built("llama")}
    calls = 10000 if request.config.getoption("--all") else 500
    codes = fuzzed(sanitized_kit(kind, bundles[kind]()), seed=1, calls=calls)
    assert min(codes[0], codes[2], codes[3]) > calls / 20


@pytest.mark.parametrize("language", sorted(LANGUAGES.keys() - {"c", "library"}))
def test_other_kits_refuse_an_encoder_decoder(language, tmp_path):
    with pytest.raises(UsageError, match="is an encoder-decoder, which kits in c and library run"):
        write_kit(language, pair("t5"), tmp_path / "kit")
