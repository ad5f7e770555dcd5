"""Kits of whole models: their self-test, and the tokens that they generate."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
import pytest
from library_kits import BINDINGS, binding_kit, program
from native_kits import compile_kit
from shared import extended, once
from tiny_decoders import MOST, built, by_bytes
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from attn_export import DecodeSession
from attn_export.bundle.golden import read_index
from attn_export.bundle.manifest import manifest_content, write_manifest
from attn_export.bundle.text_ends import TOKENIZER
from attn_export.parts.installing import home
from attn_export.parts.kits.kit import write_kit
from attn_export.parts.whole_models.bundle_text import BundleText
from attn_export.reference.stored_evidence import reduce_if_large

PYTHON = [sys.executable, "-W", "error", "-m"]
SELF_TEST = {
    "c": ["build/self_test"],
    "node": ["node", "src/self_test.mjs"],
    "python": [*PYTHON, "attn_kit.self_test"],
}
GENERATE = {
    "c": ["build/generate"],
    "node": ["node", "src/generate.mjs"],
    "web": ["node", "generate.mjs"],
    "python": [*PYTHON, "attn_kit.generation"],
    **{name: ["generate"] for name in BINDINGS},
}
NEEDS = {"web": "wasm", "python": "ort-cpu"}
"""The runtimes of kits that have another name."""
KINDS = ["llama", "gemma2", "gpt2", "gpt_neox", "llama4_text", "mixtral", "phi3", "qwen3"]
TEXTS = ["To be, or not", " x", "the  question\n\n 12345", "don't <s> it's", "Zürich 漢字 🙂!", ""]


def kit_of_model(language: str, kind: str, most: int = MOST) -> Path:
    bundle = built(kind, **({} if most == MOST else {"max_position_embeddings": most}))

    def make(kit: Path) -> None:
        write_kit(language, bundle, kit)
        if language == "c":
            compile_kit(kit, "Debug")
        elif language in BINDINGS:
            build = kit_of_model("c", kind, most) / "build"
            (kit / "library" / "build").symlink_to(build)
            if language == "csharp":  # Mono looks for the library beside the program
                shutil.copy(binding_kit(language) / "attn.exe", kit)
                shutil.copy(build / "libattn_export.so", kit)
        elif language != "python":
            (kit / "node_modules").symlink_to(home() / language / "node_modules")

    return once(f"kits/{language}-model-{kind}-{most}", make)


def run(kit: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=kit, capture_output=True, text=True)


def generate(language: str, kit: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the program of a kit; those of bindings are compiled once, for another bundle."""
    library = f"LD_LIBRARY_PATH={kit / 'library' / 'build'}"
    made = ["env", library, *program(language)] if language in BINDINGS else []
    bundle = [f"{kit}/bundle"] if language == "cpp" else []  # else it is in the folder of the kit
    return run(kit, *made, *GENERATE[language], *words, *bundle)


def programs() -> Iterator[Any]:
    """Yield a language, a type of model, and the number of its positions."""
    for language in GENERATE:
        yield language, "mistral", MOST
        for kind in ("mistral", *KINDS):
            yield pytest.param(language, kind, 96, marks=pytest.mark.extended)


@pytest.mark.parametrize(("language", "kind", "most"), [*programs()])
def test_a_kit_passes_and_generates_the_tokens_of_a_session(language, kind, most, need):
    """With --all two prompts of each type, of which one at least gives 64 tokens before an end."""
    need(NEEDS.get(language, language))
    kit = kit_of_model(language, kind, most)
    if language in SELF_TEST:
        tested = run(kit, *SELF_TEST[language])
        assert tested.returncode == 0, tested.stdout + tested.stderr
    count, found = min(64, most - 2), []
    session = DecodeSession(kit / "bundle", threads=1)
    for prompt in ("1,2,3", "5,6,7")[: 1 if most == MOST else 2]:
        ids = np.array([list(map(int, prompt.split(",")))])
        tokens = [int(row[0]) for row in session.generate(ids, count, stop=[2])]
        done = generate(language, kit, prompt, str(count))
        assert (done.stdout.split(), done.stderr) == (list(map(str, tokens)), "")
        found.append(len(tokens))
    assert max(found) == count


def test_a_kit_of_a_large_model_tests_the_cases_that_are_stored_whole(tmp_path):
    bundle = tmp_path / "bundle"
    shutil.copytree(built("mistral"), bundle)
    size = sum(file.stat().st_size for file in (bundle / "golden").rglob("*"))
    assert "of them whole" in reduce_if_large(bundle / "golden", size // 2)[0]
    write_manifest(bundle, manifest_content(bundle))
    kit = write_kit("python", bundle, tmp_path / "kit")
    tested = run(kit, *SELF_TEST["python"])
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
        ([",".join(["1"] * 41), "1"], "41 tokens and 1 more: the bundle takes 40"),
    ],
)
def test_what_a_model_does_not_take_is_one_line(language, words, says, need):
    need(NEEDS.get(language, language))
    done = generate(language, kit_of_model(language, "mistral"), *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("language", extended(["node", "python", "web"], lambda one: one != "web"))
def test_a_kit_continues_a_text(language, need, tmp_path):
    """Of its tokens some are the first and some the second byte of a character."""
    need(NEEDS.get(language, language))
    kit = tmp_path / "kit"
    shutil.copytree(kit_of_model(language, "mistral"), kit, symlinks=True)
    halves = "".join(map(chr, (*range(0xAE, 0xC0), *range(0xC3, 0xD6))))
    by_bytes(f" {ascii_uppercase}{halves}").save(str(kit / "bundle" / TOKENIZER))
    text = BundleText(kit / "bundle")
    session = DecodeSession(built("mistral"), threads=1)

    def continued(prompt: str) -> str:
        ids = text.encode(prompt)
        tokens = session.generate(np.array([ids]), 30, stop=text.generation.ends)
        return "".join(text.decode(ids, (int(row[0]) for row in tokens)))

    found = {
        prompt: continued(prompt) for prompt in ("NOT", "A", "OR NOT", "THE", "WE ARE", "TO BE")
    }
    prompt, wanted = next(
        pair for pair in found.items() if any(c > "\x80" and c != "\ufffd" for c in pair[1])
    )
    done = run(kit, *GENERATE[language], "--text", prompt, "30")
    assert (done.stdout, done.stderr) == (f"{wanted}\n", "no chat template applied\n")


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {"type": "BPE"}}', None])
@pytest.mark.every(2)
def test_a_kit_says_that_a_tokenizer_cannot_be_read(content, need, tmp_path):
    need("node")
    kit = tmp_path / "kit"
    shutil.copytree(kit_of_model("node", "mistral"), kit, symlinks=True)
    path = kit / "bundle" / "tokenizer.json"
    path.unlink() if content is None else path.write_text(content)
    done = run(kit, *GENERATE["node"], "--text", "A", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tokenizer.json ")
    assert done.stderr.count("\n") == 1


def byte_level() -> Tokenizer:
    """Return a tokenizer that splits words by the expression of GPT-4, and then knows bytes."""
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    made = by_bytes()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), "isolated"), made.pre_tokenizer]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(TEXTS * 9, trainer)
    return made


def byte_fallback() -> Tokenizer:
    """Return a tokenizer of characters, with bytes for those it does not know."""
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ Tobernt,"]
    vocabulary = {name: at for at, name in enumerate(names)}
    made = Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_texts_in_javascript_are_those_of_tokenizers(make, need, tmp_path):
    need("node")
    tokenizer = make()
    start = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.post_processor = start
    tokenizer.save(str(tmp_path / TOKENIZER))
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    before, added = ids[0], [token for more in ids[1:] for token in more]
    given = {"tokenizer": str(tmp_path / TOKENIZER), "texts": TEXTS, "ids": [before, added]}
    program = [
        "node",
        str(Path(__file__).with_name("texts.mjs")),
        str(kit_of_model("node", "mistral")),
    ]
    done = subprocess.run(program, input=json.dumps(given), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pieces = list(BundleText(tmp_path).decode(before, added))
    assert json.loads(done.stdout) == {"ids": ids, "pieces": pieces}
    assert any(piece.endswith("字") for piece in pieces)
    assert len(pieces) < len(added) - 5  # some are bytes of one character
