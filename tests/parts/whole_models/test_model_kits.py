"""Kits of whole models: their self-test, and the tokens that they generate."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_kits import compile_kit
from shared import once
from tiny_decoders import built

from attn_export import DecodeSession
from attn_export.parts.kits.kit import write_kit

SELF_TEST = {"cpp": ["build/self_test"]}
GENERATE = {"cpp": ["build/generate"]}
KINDS = ["llama", "gemma2", "gpt_neox", "llama4_text", "mixtral", "qwen3"]
MOST = 40
"""The number of positions of a model by default."""


def kit_of_model(language: str, kind: str, most: int = MOST) -> Path:
    bundle = built(kind, **({} if most == MOST else {"max_position_embeddings": most}))

    def make(kit: Path) -> None:
        write_kit(language, bundle, kit)
        compile_kit(language, kit, "Debug")

    return once(f"kits/{language}-model-{kind}-{most}", make)


def run(kit: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=kit, capture_output=True, text=True)


def programs() -> Iterator[Any]:
    """Yield a language, a type of model, and the number of its positions."""
    for language in GENERATE:
        yield language, "mistral", MOST
        for kind in ("mistral", *KINDS):
            yield pytest.param(language, kind, 96, marks=pytest.mark.extended)


@pytest.mark.parametrize(("language", "kind", "most"), [*programs()])
def test_a_kit_passes_and_generates_the_tokens_of_a_session(language, kind, most, need):
    need(language)
    kit = kit_of_model(language, kind, most)
    tested = run(kit, *SELF_TEST[language])
    assert tested.returncode == 0, tested.stdout + tested.stderr
    count = min(64, most - 2)
    session = DecodeSession(kit / "bundle", threads=1)
    tokens = [int(row[0]) for row in session.generate(np.array([[1, 2, 3]]), count, stop=[2])]
    done = run(kit, *GENERATE[language], "1,2,3", str(count))
    assert (done.stdout.split(), done.stderr) == (list(map(str, tokens)), "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["1,64", "3"], "there is no token 64; ids are 0 to 63"),
        (["1,x", "3"], "there is no token -1; ids are 0 to 63"),
        (["", "3"], "the prompt has no token"),
        (["1,2", "40"], "2 tokens and 40 more: the bundle takes 40"),
        (["1,2", "0"], "2 tokens and 0 more: the bundle takes 40"),
    ],
)
def test_what_a_model_does_not_take_is_one_line(words, says, need):
    need("cpp")
    done = run(kit_of_model("cpp", "mistral"), *GENERATE["cpp"], *words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"generate: {says}\n")
