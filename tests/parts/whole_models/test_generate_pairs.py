"""Tokens of encoder-decoders that were built, by the command: as transformers generates them."""

from __future__ import annotations

import json
import shutil
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared import once
from tiny_decoders import by_bytes, checkpoint_of
from tiny_pairs import tiny_pair
from transformers import WhisperFeatureExtractor

from attn_export.bundle.manifest import manifest_content, write_manifest
from attn_export.bundle.text_ends import ENDS
from attn_export.commands.main import run
from attn_export.errors import UsageError
from attn_export.parts.whole_models.sound import SoundConfig, features_of, read_sound

COUNT = 12
PROMPTS = [[5, 9, 33, 7, 12, 60, 3], [8], [40, 41, 42], [9, 9, 9, 9]]
HEARD = {"feature_size": 8, "hop_length": 666, "chunk_length": 1}  # 24 frames, as the model takes


def shallow(kind: str) -> Any:
    """Return a model of a layer each, whose weights are so large that tokens differ."""
    of_t5 = ("num_layers", "num_decoder_layers")
    names = of_t5 if kind == "t5" else ("encoder_layers", "decoder_layers")
    model = tiny_pair(kind, tie_word_embeddings=False, **dict.fromkeys(names, 1))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn_like(weight) * 2 / weight.shape[1] ** 0.5)
    return model


def pair(kind: str) -> Path:
    """Return the two bundles of a tiny model, built once, judged by few cases."""

    def make(folder: Path) -> None:
        checkpoint = checkpoint_of(folder)
        shallow(kind).save_pretrained(checkpoint)
        if kind == "whisper":
            WhisperFeatureExtractor(**HEARD).save_pretrained(checkpoint)
        else:
            by_bytes("".join(map(chr, range(32, 96)))).save(str(checkpoint / "tokenizer.json"))
        options = ["--output", str(folder), "--runtime", "ort-cpu", "--dialect", "ort", "--quiet"]
        # Embeddings that are not tied leave the shared ones of BART unused.
        options += ["--text-only"] * (kind == "bart")
        with pytest.MonkeyPatch.context() as patch:
            for part in ("model", "encoder"):
                patch.setattr(f"attn_export.parts.whole_models.build.{part}._MOST_CASES", 3)
            assert run(["build", "--model", str(checkpoint), *options]) == 0

    return once(f"pairs/{kind}", make)


def saying(folder: Path, copy: Path, **config: Any) -> Path:
    """Return a copy of two bundles with other fields of the generation config."""
    shutil.copytree(folder, copy)
    said = json.loads((copy / "decoder" / ENDS).read_text())
    (copy / "decoder" / ENDS).write_text(json.dumps({**said, **config}))
    write_manifest(copy / "decoder", manifest_content(copy / "decoder"))
    return copy


def wanted_of(kind: str, config: dict[str, Any], **inputs: torch.Tensor) -> list[list[int]]:
    """Return the greedy tokens of transformers, up to the end of each."""
    model = shallow(kind)
    for name, value in config.items():
        setattr(model.generation_config, name, value)
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=COUNT, num_beams=1, do_sample=False)
    ends = model.generation_config.eos_token_id
    rows = [row[-COUNT:] if kind == "whisper" else row[1:] for row in tokens.tolist()]
    return [row[: row.index(ends) + 1] if ends in row else row for row in rows]


TEXTS: dict[str, dict[str, Any]] = {
    "plain": {}, "forced": {"forced_bos_token_id": 7, "forced_eos_token_id": 9},
    "suppressed": {"suppress_tokens": [2, 52], "begin_suppress_tokens": [5], "eos_token_id": 50},
    "start": {"decoder_start_token_id": 11, "repetition_penalty": 1.7},
    "both": {"forced_bos_token_id": 7, "begin_suppress_tokens": [*range(32)]},
}  # fmt: skip


@pytest.mark.parametrize("config", TEXTS)
@pytest.mark.parametrize("kind", ["t5", pytest.param("bart", marks=pytest.mark.extended)])
def test_texts_of_unequal_length_give_the_tokens_of_transformers(kind, config, tmp_path, cli):
    (tmp_path / "ids.json").write_text(json.dumps(PROMPTS))
    folder = saying(pair(kind), tmp_path / "bundle", **TEXTS[config])
    said = cli("generate", folder, "--prompts", tmp_path / "ids.json", "--count", COUNT)
    assert said.returncode == 0, said.stderr
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in PROMPTS])
    mask = torch.tensor([[at < len(prompt) for at in range(longest)] for prompt in PROMPTS])
    wanted = wanted_of(kind, TEXTS[config], input_ids=ids, attention_mask=mask.long())
    found = [json.loads(line)["ids"] for line in said.stdout.splitlines()]
    assert found == wanted


def test_a_text_gives_text(cli):
    ids = cli("generate", pair("t5"), "--ids", "33,34,35", "--count", "9")
    said = cli("generate", pair("t5"), "--prompt", "ABC", "--count", "9")
    assert said.stdout == "".join(chr(32 + int(word)) for word in ids.stdout.split()) + "\n"
    assert (said.returncode, said.stderr) == (0, "")


def test_draws_are_those_of_the_seed_among_the_likeliest_tokens(cli):
    def drawn(*options: str) -> str:
        said = cli("generate", pair("t5"), "--ids", "33,34,35", "--count", "9", *options)
        assert said.returncode == 0, said.stderr
        return str(said.stdout)

    warm = ("--temperature", "3", "--top-p", "0.95")
    one, again, other = (drawn(*warm, "--seed", seed) for seed in ("1", "1", "2"))
    assert one == again
    assert len({one, other, drawn()}) == 3
    assert drawn("--temperature", "3", "--top-p", "0.000001", "--seed", "1") == drawn()


_WORDS = {"lang_to_id": {"<|en|>": 21, "<|fr|>": 35}, "task_to_id": {"transcribe": 40}}
SOUNDS: dict[str, dict[str, Any]] = {
    "plain": {}, "found": {**_WORDS, "no_timestamps_token_id": 44},
    "forced": {**_WORDS, "forced_decoder_ids": [[1, None], [2, 40], [3, 44]],
               "no_timestamps_token_id": 44, "begin_suppress_tokens": [*range(0, 64, 3)]},
    "told": {**_WORDS, "language": "en", "task": "transcribe", "suppress_tokens": [11, 51]},
    "language": {**_WORDS, "language": "fr", "forced_bos_token_id": 7},
}  # fmt: skip


@pytest.mark.parametrize("config", SOUNDS)
def test_features_give_the_tokens_of_transformers(config, tmp_path, cli):
    features = np.random.default_rng(3).standard_normal((8, 24), np.float32)
    np.save(tmp_path / "sound.npy", features)
    config = {**SOUNDS[config], "eos_token_id": None}
    folder = saying(pair("whisper"), tmp_path / "bundle", **config)
    said = cli("generate", folder, "--sound", tmp_path / "sound.npy", "--count", COUNT)
    assert said.returncode == 0, said.stderr
    wanted = wanted_of("whisper", config, input_features=torch.tensor(features[None]))
    assert len({*wanted[0]}) > 3
    assert [[*map(int, said.stdout.split())]] == wanted


def write_wav(path: Path, samples: np.ndarray, *, width: int = 2, rate: int = 16000) -> Path:
    """Write samples `[N, channels]` in −1 … 1."""
    scaled = np.round(samples * 2.0 ** (8 * width - 1))
    kind = {1: "u1", 2: "<i2", 3: "<i4", 4: "<i4"}[width]
    with wave.open(str(path), "wb") as file:
        file.setparams((samples.shape[1], width, rate, 0, "NONE", ""))
        file.writeframes((scaled + 128 * (width == 1)).astype(kind).tobytes())
    return path


def test_sound_gives_the_tokens_of_its_features(tmp_path, cli):
    sound = np.sin(np.arange(9000) / 7)[:, None] / 2
    write_wav(tmp_path / "sound.wav", sound)
    features = WhisperFeatureExtractor(**HEARD)(sound[:, 0], sampling_rate=16000)
    np.save(tmp_path / "sound.npy", features["input_features"])
    found = [
        cli("generate", pair("whisper"), "--sound", tmp_path / f"sound.{suffix}", "--count", 9)
        for suffix in ("wav", "npy")
    ]
    assert found[0].returncode == 0, found[0].stderr
    assert found[0].stdout == found[1].stdout


FORMS = {"default": {}, "large": {"feature_size": 128, "chunk_length": 2}, "tiny": HEARD,
         "other": {"n_fft": 512, "hop_length": 200, "chunk_length": 1}}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("width", "channels"), [(1, 1), (2, 2), (4, 1)])
def test_features_are_those_of_transformers(form, width, channels, tmp_path):
    theirs = WhisperFeatureExtractor(**FORMS[form])
    theirs.save_pretrained(tmp_path)
    random = np.random.default_rng(2)
    sound = np.clip(random.standard_normal((theirs.n_samples // 2, channels)) / 9, -0.9, 0.9)
    sound = np.round(sound * 2.0 ** (8 * width - 1)) / 2.0 ** (8 * width - 1)  # as in the file
    path = write_wav(tmp_path / "sound.wav", sound, width=width)
    wanted = theirs(sound.mean(1), sampling_rate=16000, return_tensors="np")["input_features"][0]
    np.testing.assert_allclose(features_of(path, read_sound(tmp_path)), wanted, atol=2e-5)


HEARS = SoundConfig(feature_size=8, chunk_length=1)
FILES = {
    "rate": ("has 8000 Hz; give 16000 Hz", "wav"), "long": ("lasts 2.0 s, and the model", "wav"),
    "bits": ("no samples of 8, 16 or 32 bits", "wav"), "none": ("no samples of 8", "wav"),
    "text": ("is no .wav file of integers", "wav"), "pickle": ("holds no features", "npy"),
    "nan": ("holds NaN or infinity", "npy"), "cut": ("holds no features", "npy"),
    "flac": ("--sound is FILE.wav or FILE.npy", "flac"), "missing": ("No such file", "wav"),
    "no config": ("has no preprocessor_config.json", "wav"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_sound_is_one_line(kind, tmp_path):
    message, suffix = FILES[kind]
    path = tmp_path / f"sound.{suffix}"
    sound = np.zeros((0 if kind == "none" else 32000 if kind == "long" else 99, 1))
    if suffix == "wav" and kind not in ("text", "missing"):
        write_wav(path, sound, rate=8000 if kind == "rate" else 16000, width=2 + (kind == "bits"))
    elif suffix == "npy":
        array: Any = np.array([{}]) if kind == "pickle" else np.full((8, 24), np.nan, np.float32)
        np.save(path, array, allow_pickle=True)
        path.write_bytes(path.read_bytes()[: -1 if kind == "cut" else None])
    elif kind != "missing":
        path.write_bytes(b"RIFF....WAVE")
    with pytest.raises(UsageError, match=message) as caught:
        features_of(path, None if kind == "no config" else HEARS)
    assert "\n" not in str(caught.value)


WRONG = [
    ("whisper", ("--ids", "1"), {}, 2, "the encoder takes input_features; give --sound FILE"),
    ("t5", ("--sound", "8"), {}, 2, "the encoder takes input_ids; give --prompt"),
    ("whisper", ("--sound", "7"), {}, 2, "the features are [7, 24]; the encoder takes [8, 24]"),
    ("whisper", ("--sound", "8", "--chat"), {}, 2, "--chat is for text"),
    ("t5", ("--ids", "64"), {}, 2, "input_ids has 64; give 0 to 63"),
    ("t5", ("--ids", "-1"), {}, 2, "input_ids has -1"),
    ("t5", ("--ids", "1", "--dialect", "cuda"), {}, 2, "has no cuda graphs"),
    ("t5", ("--ids", "1"), {"forced_bos_token_id": 64}, 2, "forces token 64; there are 64"),
    ("t5", ("--ids", "1"), {"decoder_start_token_id": None}, 7, "no decoder_start_token_id"),
    ("t5", ("--ids", "1"), {"decoder_start_token_id": 64}, 2, "input_ids has 64"),
    ("t5", ("--ids", "1"), {"language": "xx"}, 7, "has no token of <|xx|>"),
    ("whisper", ("--sound", "8"), {"lang_to_id": {"a": 99}}, 2, "lang_to_id has 99"),
]


@pytest.mark.parametrize(("kind", "words", "config", "code", "message"), WRONG)
def test_what_cannot_be_generated_is_one_line(kind, words, config, code, message, tmp_path, cli):
    np.save(tmp_path / "sound.npy", np.zeros((int(words[1]) % 99, 24), np.float32))
    given = [
        tmp_path / "sound.npy" if words[at - 1] == "--sound" else w for at, w in enumerate(words)
    ]
    folder = saying(pair(kind), tmp_path / "bundle", **config) if config else pair(kind)
    said = cli("generate", folder, *given)
    assert (said.returncode, said.stdout, said.stderr.count("\n")) == (code, "", 1)
    assert message in said.stderr
