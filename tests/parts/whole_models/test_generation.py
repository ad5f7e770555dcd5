"""Tokens and text of a whole model that was built: as transformers generates them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_decoders import built, by_bytes, checkpoint_of, tiny_decoder
from transformers import AutoModelForCausalLM

from attn_export import DecodeSession
from attn_export.bundle.manifest import manifest_content, write_manifest
from attn_export.bundle.text_ends import ENDS, TOKENIZER
from attn_export.errors import AttnExportError, BundleError, UsageError
from attn_export.parts.whole_models.bundle_text import BundleText, files_of
from attn_export.parts.whole_models.generated_text import harmless


@pytest.fixture(scope="module")
def bundle() -> Path:
    return built("mistral")


@pytest.fixture
def session(bundle: Path) -> DecodeSession:
    return DecodeSession(bundle, block=8, threads=1)


IDS = np.random.default_rng(5).integers(3, 64, (2, 9))
MASK = np.ones((2, 9), np.int64)
MASK[1, :4] = 0


def test_greedy_tokens_of_padded_prompts_are_those_of_transformers(bundle, session):
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of(bundle), dtype=torch.float32)
    with torch.no_grad():
        wanted = model.generate(
            torch.tensor(IDS), attention_mask=torch.tensor(MASK), max_new_tokens=30,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )[:, 9:]  # fmt: skip
    tokens = np.stack(list(session.generate(IDS, 30, attention_mask=MASK)), axis=1)
    assert tokens.tolist() == wanted.tolist()
    assert session.lengths.tolist() == [38, 34]
    right = np.where(MASK[:, ::-1] == 1, np.stack([IDS[0], np.roll(IDS[1], 5)]), 63)
    again = np.stack(list(session.generate(right, 30, lengths=[9, 5])), axis=1)
    assert again.tolist() == wanted.tolist()


def test_drafts_are_checked_in_one_step_and_rewound(session):
    tokens = np.stack(list(session.generate(IDS, 10)), axis=1)
    session.prefill(IDS)
    drafts = np.concatenate([tokens[:, :3], (tokens[:, 3:5] + 1) % 64], axis=1)
    logits = session.step(drafts, logit_index=np.tile(np.arange(5), (2, 1)))["logits"]
    assert logits[:, :3].argmax(-1).tolist() == tokens[:, 1:4].tolist()
    session.rewind(2)
    assert session.step(tokens[:, 3:4])["logits"].argmax(-1)[:, 0].tolist() == tokens[:, 4].tolist()


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6}])
def test_draws_from_the_likeliest_token_alone_are_greedy(options, session):
    greedy = np.stack(list(session.generate(IDS, 6)))
    drawn = np.stack(list(session.generate(IDS, 6, **{"temperature": 1.0, **options})))
    assert drawn.tolist() == greedy.tolist()


def test_draws_have_the_shares_of_the_softmax(session):
    logits = session.prefill(IDS[:1])["logits"][0, 0].astype(np.float64)
    rows = np.tile(IDS[:1], (4000, 1))
    (token,) = session.generate(rows, 1, temperature=0.5, top_k=5, seed=3)
    likely = np.argsort(-logits)[:5]
    shares = np.exp(logits[likely] / 0.5 - logits[likely[0]] / 0.5)
    found = (token[:, None] == likely).mean(0)
    assert set(token.tolist()) == set(likely.tolist())
    np.testing.assert_allclose(found, shares / shares.sum(), atol=0.03)
    (again,) = session.generate(rows, 1, temperature=0.5, top_k=5, seed=3)
    (other,) = session.generate(rows, 1, temperature=0.5, top_k=5, seed=4)
    assert (again == token).all()
    assert (other != token).any()
    (nucleus,) = session.generate(rows, 1, temperature=0.5, top_p=0.5, seed=3)
    everything = np.exp(logits / 0.5 - logits.max() / 0.5)
    order = np.argsort(-logits)
    least = int((np.cumsum(everything[order]) / everything.sum() < 0.5).sum()) + 1
    assert set(nucleus.tolist()) == set(order[:least].tolist())


def test_a_row_that_has_ended_gives_no_more_tokens(session):
    tokens = np.stack(list(session.generate(IDS, 12)), axis=1)
    ends = int(tokens[0, 3])
    found = np.stack(list(session.generate(IDS, 12, stop=[ends])), axis=1)
    at = tokens[0].tolist().index(ends)
    assert found[0, : at + 1].tolist() == tokens[0, : at + 1].tolist()
    assert set(found[0, at + 1 :].tolist()) <= {-1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "count is 0"), ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"), ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"), ({"top_k": -2}, "top_k is -2"),
        ({"stop": ["x"]}, "stop is"), ({"stop": 2}, "stop is 2"), ({"stop": None}, "stop is None"),
        ({"repetition_penalty": 0}, "penalty is 0"),
        ({"seed": -1}, "seed is"), ({"top": 1}, "unknown option top"), ({"ids": [[64]]}, "has 64"),
        ({"ids": [[-1]]}, "has -1"), ({"ids": [[0.5]]}, "give int64"), ({"ids": [["a"]]}, "int64"),
        ({"ids": [[2**70]]}, "give int64"), ({"ids": [1, 2]}, "give .batch, query_len"),
        ({"ids": None}, "give .batch, query_len"), ({"ids": [[1, 2], [3]]}, "is not an array"),
        ({"ids": np.zeros((1, 0), np.int64)}, "empty"),
        ({"ids": np.zeros((0, 3), np.int64)}, "empty"), ({"lengths": [0, 9]}, "lengths are"),
        ({"lengths": [3, 3], "attention_mask": MASK}, "say the same"),
        ({"attention_mask": 0 * MASK}, "leaves a prompt without a token"),
        ({"attention_mask": [[1], [1, 1]]}, "give 0 and 1 of shape"),
        ({"attention_mask": 2 * MASK}, "give 0 and 1 of shape"),
        ({"ids": np.zeros((1, 41), np.int64)}, "there would be 44 tokens, and the bundle takes 40"),
        ({"count": 33}, "there would be 41 tokens"), ({"count": 2**24}, "the bundle takes 40"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused_and_the_session_goes_on(options, message, session):
    session.prefill(IDS)
    wanted = session.step(IDS[:, :1])["logits"]
    session.rewind(1)
    given = {"ids": IDS, "count": 4, **options}
    with pytest.raises(UsageError, match=message) as caught:
        session.generate(given.pop("ids"), given.pop("count"), **given)
    assert "\n" not in str(caught.value)
    assert (session.step(IDS[:, :1])["logits"] == wanted).all()


@pytest.mark.parametrize(
    ("ids", "index", "message"),
    [
        ([[64], [0]], None, "input_ids has 64"), ([[-1], [0]], None, "input_ids has -1"),
        (np.zeros((2, 0), np.int64), None, "empty"), ([[1]], None, "has 1 rows, the cache 2"),
        (np.zeros((2, 32), np.int64), None, "there would be 41 tokens, and the bundle takes 40"),
        (IDS[:, :3], [[3], [0]], "logit_index has 3"), (IDS[:, :3], [[-1], [0]], "has -1"),
        (IDS[:, :3], [[0.0], [0.0]], "give int64"), (IDS[:, :3], [0, 0], "should be"),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_are_refused_and_the_session_goes_on(ids, index, message, session):
    session.prefill(IDS)
    wanted = session.step(IDS[:, :1])["logits"]
    session.rewind(1)
    with pytest.raises(UsageError, match=message):
        session.step(ids, **({} if index is None else {"logit_index": index}))
    assert (session.step(IDS[:, :1])["logits"] == wanted).all()


def test_all_positions_are_used_and_then_a_step_is_refused(session):
    assert len(list(session.generate(IDS[:1], 32))) == 32
    assert session.lengths.tolist() == [40]
    with pytest.raises(UsageError, match="there would be 41 tokens"):
        session.step(IDS[:1, :1])


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("other", ["generate", "prefill", "step", "rewind", "reorder"])
def test_tokens_end_in_an_error_once_the_session_does_something_else(other, begun, session):
    tokens = session.generate(IDS, 5)
    if begun:
        next(tokens)
    given = {"generate": (IDS + 0, 5), "prefill": (IDS,), "step": (IDS[:, :1],), "rewind": (1,),
             "reorder": ([0, 1],)}[other]  # fmt: skip
    getattr(session, other)(*given)
    with pytest.raises(UsageError, match="used for something else"):
        list(tokens)


def test_what_a_session_hands_out_cannot_change_it(session):
    wanted = [token.tolist() for token in session.generate(IDS, 4)]
    found = []
    for token in session.generate(IDS, 4):
        found.append(token.tolist())
        session.lengths[...] = 0
        token[...] = 0
    assert found == wanted
    prefilled = session.prefill(IDS)["logits"]
    before = prefilled.copy()
    session.step(IDS[:, :1])["logits"][...] = 0
    assert (prefilled == before).all()


# -- text -------------------------------------------------------------------------------------


def test_bytes_wait_until_they_are_a_character(tmp_path):
    by_bytes().save(str(tmp_path / TOKENIZER))
    text = BundleText(tmp_path)
    before, ids = text.encode("Zürich, "), text.encode("naïve 漢字 🙂!")
    pieces = list(text.decode(before, ids))
    assert "".join(pieces) == "naïve 漢字 🙂!"
    assert {"ï", "漢", "🙂"} <= set(pieces)
    assert "".join(text.decode(before, ids[:-3])) == "naïve 漢字 \ufffd"  # cut within a character


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{}", "is no tokenizer"), (b"\xff" * 9, "is no tokenizer"), (None, "has no tokenizer.json")],
)
def test_a_tokenizer_that_cannot_be_read_is_one_line(content, message, tmp_path):
    if content is not None:
        (tmp_path / TOKENIZER).write_bytes(content)
    with pytest.raises(AttnExportError, match=message) as caught:
        BundleText(tmp_path).encode("x")
    assert "\n" not in str(caught.value)


def _hostile(**fields: object) -> str:
    """Return a tokenizer of words, with other fields."""
    words = {"type": "WordLevel", "vocab": {"A": 0, "::": 1, "error": 2}, "unk_token": "[UNK]"}
    none = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    return json.dumps({
        "version": "1.0", "added_tokens": [], **none, "pre_tokenizer": {"type": "Whitespace"},
        "model": words, **fields,
    })  # fmt: skip


_LONGER = {"type": "Replace", "pattern": {"String": "A"}, "content": "A" * 10**5}
_SLOW = {"type": "Split", "pattern": {"Regex": "(A+)+$"}, "behavior": "Isolated",
         "invert": False}  # fmt: skip
HOSTILE = {
    "unknown": (_hostile(), "B", UsageError, "refuses the text: .*UNK"),
    "bomb": (
        _hostile(normalizer={"type": "Sequence", "normalizers": [_LONGER] * 3}), "A", BundleError,
        "its tokenizer, given text, ",
    ),
    "panic": (_hostile(pre_tokenizer=_SLOW), "A" * 40 + "D", BundleError, "given text, .*anic"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_tokenizer_acts_within_limits(kind, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("attn_export.parts.whole_models.bundle_text._MOST_MIB", 256)
    content, prompt, error, message = HOSTILE[kind]
    (tmp_path / TOKENIZER).write_text(content)
    with pytest.raises(error, match=message) as caught:
        BundleText(tmp_path).encode(prompt)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["::error::x"], ":\\x3aerror::x"), (["a\n :", ":warning::"], "a\n :\\x3awarning::"),
        (["a ##", "[error]b"], "a ##\\x5berror]b"), (["a::b", "\x1b[1m"], "a::b\\x1b[1m"),
    ],
)  # fmt: skip
def test_text_gives_a_ci_system_no_command(pieces, shown):
    assert "".join(harmless(iter(pieces), "")) == shown


@pytest.mark.parametrize("ends", [{"eos_token_id": [-1]}, {"eos_token_id": "2"}, []])
def test_ends_that_are_no_ids_are_refused(ends, tmp_path):
    (tmp_path / ENDS).write_text(json.dumps(ends))
    with pytest.raises(AttnExportError, match="cannot be read"):
        BundleText(tmp_path)


def test_the_command_prints_the_ids_of_a_prompt(bundle, cli, session):
    wanted = [int(token[0]) for token in session.generate(IDS[:1], 7)]
    said = cli("generate", bundle, "--ids", ",".join(map(str, IDS[0])), "--count", "7")
    assert (said.returncode, said.stdout) == (0, " ".join(map(str, wanted)) + "\n")


def test_the_settings_of_a_generation_config_are_used_or_named(bundle, cli, session, tmp_path):
    folder = shutil.copytree(bundle, tmp_path / "bundle")
    said = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "num_beams": 4,
            "repetition_penalty": 1.3, "min_p": None, "typical_p": 1.0}  # fmt: skip
    (tmp_path / ENDS).write_text(json.dumps(said))
    (folder / ENDS).write_bytes(files_of(tiny_decoder("mistral"), tmp_path, 64)[ENDS])
    write_manifest(folder, manifest_content(folder))
    draws = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "repetition_penalty": 1.3}
    words = ("--ids", ",".join(map(str, IDS[0])), "--count", "9", "--seed", "3")
    for more, changed in (((), {}), (("--temperature", "0"), {"temperature": 0})):
        wanted = session.generate(IDS[:1], 9, seed=3, **(draws | changed))
        found = cli("generate", folder, *words, *more)
        assert found.stdout == " ".join(str(token[0]) for token in wanted) + "\n"
        assert "top_p 0.8" in found.stderr
        assert found.stderr.endswith("has, and generate does not use: num_beams\n")


def test_a_penalty_of_repetitions_is_that_of_transformers(bundle, session):
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of(bundle), dtype=torch.float32)
    with torch.no_grad():
        wanted = model.generate(
            torch.tensor(IDS), max_new_tokens=20, do_sample=False, eos_token_id=None,
            pad_token_id=0, repetition_penalty=1.5,
        )[:, 9:]  # fmt: skip
    tokens = np.stack(list(session.generate(IDS, 20, repetition_penalty=1.5)), axis=1)
    assert tokens.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ids", "1,x"), "--ids are token ids with commas"), (("--ids", ""), "got ''"),
        (("--ids", "64"), "input_ids has 64; give 0 to 63"), (("--ids", "-1"), "input_ids has -1"),
        (("--ids", "9" * 30), "give int64"), (("--prompt", ""), "the prompt has no token"),
        (("--prompt", "é"), "the prompt has no token"), ((), "give one of --prompt TEXT, --ids"),
        (("--ids", "1", "--prompt", "A"), "give one of --prompt TEXT"),
        (("--ids", "1,2"), "there would be 65 tokens, and the bundle takes 40"),
        (("--ids", ",".join(["1"] * 41), "--count", "1"), "there would be 41 tokens"),
    ],
)  # fmt: skip
def test_what_the_command_cannot_continue_is_one_line(words, message, bundle, cli):
    said = cli("generate", bundle, *words)
    assert (said.returncode, said.stdout, said.stderr.count("\n")) == (2, "", 1)
    assert message in said.stderr


def test_the_command_prints_text_until_the_model_ends_it(bundle, cli, session):
    """The checkpoint's config names 2 as the token that ends a text."""
    text = BundleText(bundle)
    assert text.generation.ends == (2,)
    ids = text.encode("TO BE, OR NOT")
    tokens = [int(token[0]) for token in session.generate(np.array([ids]), 20, stop=[2])]
    said = cli("generate", bundle, "--prompt", "TO BE, OR NOT", "--count", "20")
    assert (said.returncode, said.stdout) == (0, "".join(chr(32 + t) for t in tokens) + "\n")
    assert said.stderr == "no chat template applied\n"
    said = cli("generate", bundle.with_name("none"), "--prompt", "TO BE, OR NOT")
    assert said.returncode != 0
    assert said.stderr.count("\n") == 1
