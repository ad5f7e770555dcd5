"""Kits of whole models: their self-test, and the tokens that they generate."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_kits import compile_kit
from shared import once
from tiny_decoders import built

from attn_export import DecodeSession
from attn_export.bundle.golden import read_index
from attn_export.bundle.manifest import manifest_content, write_manifest
from attn_export.parts.installing import home
from attn_export.parts.kits.kit import write_kit
from attn_export.parts.whole_models.stored_evidence import reduce_if_large

PYTHON = [sys.executable, "-W", "error", "-m"]
SELF_TEST = {
    "c": ["build/self_test"],
    "cpp": ["build/self_test"],
    "node": ["node", "src/self_test.mjs"],
    "python": [*PYTHON, "attn_kit.self_test"],
}
GENERATE = {
    "c": ["build/generate"],
    "cpp": ["build/generate"],
    "node": ["node", "src/generate.mjs"],
    "python": [*PYTHON, "attn_kit.generation"],
}
KINDS = ["llama", "gemma2", "gpt_neox", "llama4_text", "mixtral", "qwen3"]
MOST = 40
"""The number of positions of a model by default."""


def kit_of_model(language: str, kind: str, most: int = MOST) -> Path:
    bundle = built(kind, **({} if most == MOST else {"max_position_embeddings": most}))

    def make(kit: Path) -> None:
        write_kit(language, bundle, kit)
        if language == "node":
            (kit / "node_modules").symlink_to(home() / "node" / "node_modules")
        elif language != "python":
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
    if language != "python":
        need(language)
    kit = kit_of_model(language, kind, most)
    tested = run(kit, *SELF_TEST[language])
    assert tested.returncode == 0, tested.stdout + tested.stderr
    count = min(64, most - 2)
    session = DecodeSession(kit / "bundle", threads=1)
    tokens = [int(row[0]) for row in session.generate(np.array([[1, 2, 3]]), count, stop=[2])]
    done = run(kit, *GENERATE[language], "1,2,3", str(count))
    assert (done.stdout.split(), done.stderr) == (list(map(str, tokens)), "")


@pytest.mark.parametrize("language", ["node", "python"])
def test_a_kit_of_a_large_model_tests_the_cases_that_are_stored_whole(language, need, tmp_path):
    if language != "python":
        need(language)
    bundle = tmp_path / "bundle"
    shutil.copytree(built("mistral"), bundle)
    size = sum(file.stat().st_size for file in (bundle / "golden").rglob("*"))
    assert "of them whole" in reduce_if_large(bundle / "golden", size // 2)[0]
    write_manifest(bundle, manifest_content(bundle))
    kit = write_kit(language, bundle, tmp_path / "kit")
    if language == "node":
        (kit / "node_modules").symlink_to(home() / "node" / "node_modules")
    tested = run(kit, *SELF_TEST[language])
    assert tested.returncode == 0, tested.stdout + tested.stderr
    whole = sum(not case.shapes for case in read_index(bundle / "golden").cases)
    assert [line.startswith("ok ") for line in tested.stdout.splitlines()].count(True) == whole


@pytest.mark.parametrize("language", GENERATE)
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
def test_what_a_model_does_not_take_is_one_line(language, words, says, need):
    if language != "python":
        need(language)
    done = run(kit_of_model(language, "mistral"), *GENERATE[language], *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_python_kit_continues_a_text():
    kit = kit_of_model("python", "mistral")
    done = run(kit, *GENERATE["python"], "AB", "5", "--text")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("AB")
    assert len(done.stdout) > len("AB\n")
