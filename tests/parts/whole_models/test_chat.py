"""Chat templates: rendered as transformers does, and within limits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML, TEMPLATES
from tiny_decoders import built, by_bytes
from transformers import PreTrainedTokenizerFast

from attn_export import DecodeSession
from attn_export.bundle.manifest import manifest_content, write_manifest
from attn_export.bundle.text_ends import ENDS, TOKENIZER
from attn_export.errors import AttnExportError
from attn_export.parts.whole_models import bundle_text
from attn_export.parts.whole_models.bundle_text import BundleText, files_of
from attn_export.parts.whole_models.chat_template import CHAT, read_template
from attn_export.parts.whole_models.generated_text import json_line, rows_of, until

TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": " Who is <b>\"Zoë\"</b> & 'I'?\r\n"},
    {"role": "assistant", "content": "<think>\nHm\n</think>\n\nA friend.", "tool_calls": None},
    {"role": "user", "content": "And now?"},
]
SYSTEM = {"role": "system", "content": "Be brief. "}
THOUGHT = {"role": "assistant", "content": "Yes.", "thinking": "They ask. "}
CALL = {
    "role": "assistant", "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": {"x": "é<", "y": [1, None]}}}],
}  # fmt: skip
CHATS = {"one": TURNS[:1], "turns": TURNS, "system": [SYSTEM, *TURNS]}


def tokenizer_of(template: Any) -> PreTrainedTokenizerFast:
    tokenizer = by_bytes()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
    )


def wanted_of(tokenizer: PreTrainedTokenizerFast, chat: list[dict[str, Any]]) -> list[int]:
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize("family", TEMPLATES)
def test_messages_have_the_ids_of_transformers(family, tmp_path):
    tokenizer = tokenizer_of(TEMPLATES[family])
    tokenizer.save_pretrained(tmp_path)
    text = BundleText(tmp_path)
    more = {"qwen3": {"thought": [*TURNS, THOUGHT]}, "granite": {"call": [*TURNS, CALL]}}
    for chat in (*CHATS.values(), *more.get(family, {}).values()):
        assert text.encode_chat(chat) == wanted_of(tokenizer, chat)


@pytest.mark.parametrize("named", [False, True])
def test_templates_in_the_config_are_read_as_those_in_a_file(named, tmp_path):
    template = {"default": CHATML, "tool_use": "{{ raise_exception('no') }}"} if named else CHATML
    tokenizer = tokenizer_of(template)
    tokenizer.save_pretrained(tmp_path, save_jinja_files=False)
    assert not (tmp_path / "chat_template.jinja").exists()
    wanted = wanted_of(tokenizer, TURNS)
    assert BundleText(tmp_path).encode_chat(TURNS) == wanted
    no_decoder = SimpleNamespace(can_generate=lambda: False, main_input_name="")
    for name, content in files_of(no_decoder, tmp_path, 0).items():
        (tmp_path / name).write_bytes(content)  # as in a bundle, which transformers reads, too
    assert BundleText(tmp_path).encode_chat(TURNS) == wanted
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert wanted_of(again, TURNS) == wanted
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}")
    assert BundleText(tmp_path).encode_chat(TURNS) == [again.bos_token_id]
    said = {"bos_token": {"content": "</s>", "lstrip": False}, "eos_token": "<s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(said))
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert BundleText(tmp_path).encode_chat(TURNS) == wanted_of(again, TURNS)


_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}"
_ENDS = "{% endfor %}{% endfor %}"
HOSTILE = {
    "range": ("{% for a in range(10**9) %}{% endfor %}", "Range too big"),
    "time": (f"{_LOOP}{_ENDS}", "its chat template, given messages, timed out after 2 s"),
    "power": ("{{ 7 ** (7 ** 12) }}", "timed out after 2 s"),
    "output": (f"{_LOOP}{'x' * 99}{_ENDS}", "makes more than 4194304 characters"),
    "string": ("{{ messages[0].content * 10**6 }}", "makes more than 4194304 characters"),
    "memory": ("{{ messages[0].content * 10**9 }}", "given messages, .*MemoryError"),
    "format": ("{{ '%999999999d' % 1 }}", "given messages, .*MemoryError"),
    "deep": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "RecursionError"),
    "python": ("{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__ }}", "SecurityError"),
    "space": ("{% set n = namespace(__class__=1) %}", "SecurityError"),
    "change": ("{{ messages.append(1) }}", "SecurityError"),
    "file": ("{% include 'x' %}", "no loader"),
    "refusal": ("{{ raise_exception('no\nsystem') }}", "refuses the messages: .*no system"),
    "syntax": ("{% if %}", "refuses the messages: TemplateSyntaxError"),
    "nothing": ("", "the prompt has no token"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_template_acts_within_limits(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle_text, "_MOST_MIB", 256)
    if "2 s" in HOSTILE[kind][1]:
        monkeypatch.setattr(bundle_text, "_TEMPLATE_SECONDS", 2.0)
    by_bytes().save(str(tmp_path / TOKENIZER))
    (tmp_path / "chat_template.jinja").write_text(HOSTILE[kind][0])
    text = BundleText(tmp_path)
    with pytest.raises(AttnExportError, match=HOSTILE[kind][1]) as caught:
        text.encode_chat(TURNS)
    assert "\n" not in str(caught.value)
    assert text.encode("A")  # by a new process, if the first had to be ended


@pytest.mark.parametrize(
    "config",
    [b"[]", b"{", b"\xff", b'{"chat_template": 5}', b'{"chat_template": [{"name": "default"}]}'],
)
def test_a_config_with_a_wrong_template_is_one_line(config, tmp_path):
    (tmp_path / CHAT).write_bytes(config)
    with pytest.raises(AttnExportError, match="cannot be read") as caught:
        read_template(tmp_path)
    assert "\n" not in str(caught.value)


# -- the command ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle() -> Path:
    """Return the bundle of a decoder that other tests have built."""
    return built("mistral")


def test_the_build_keeps_the_template_and_generate_applies_it(bundle, tmp_path, cli):
    folder = shutil.copytree(bundle, tmp_path / "bundle")
    (folder / CHAT).write_text('{"chat_template": "{{ messages[0].content }}: ", "eos_token": "x"}')
    write_manifest(folder, manifest_content(folder))
    words = ("--count", "9", "--temperature", "0")
    plain = cli("generate", folder, "--prompt", "TO BE: ", *words)
    assert plain.stderr == "no chat template applied; --chat applies it\n"
    chat = cli("generate", folder, "--chat", "--prompt", "TO BE", *words)
    assert (chat.returncode, chat.stdout, chat.stderr) == (0, plain.stdout, "")
    said = cli("generate", bundle, "--chat", "--prompt", "TO BE")
    assert (said.returncode, said.stderr.count("\n")) == (2, 1)
    assert "has no chat template; leave --chat out" in said.stderr


PROMPTS = ["TO BE", "A", "OR NOT TO BE, THAT IS", "Z", "Q", "W", "NOW", "X", "Y"]


@pytest.mark.parametrize("suffix", ["txt", "json", "jsonl"])
def test_prompts_of_a_file_give_what_each_gives_alone(suffix, bundle, tmp_path, cli):
    lines = PROMPTS if suffix == "txt" else map(json.dumps, PROMPTS)
    content = json.dumps(PROMPTS) if suffix == "json" else "\n".join(lines)
    file = tmp_path / f"prompts.{suffix}"
    file.write_text(content)
    found = cli("generate", bundle, "--prompts", file, "--count", "9", "--stop", "~~")
    assert found.returncode == 0, found.stderr
    session, text = DecodeSession(bundle, threads=1), BundleText(bundle)
    for prompt, line in zip(PROMPTS, found.stdout.splitlines(), strict=True):
        ids = text.encode(prompt)
        tokens = session.generate(np.array([ids]), 9, stop=text.generation.ends)
        wanted = "".join(text.decode(ids, (int(token[0]) for token in tokens)))
        assert json.loads(line) == {"text": wanted}


def test_ids_of_a_file_give_ids_and_a_row_that_ends_gives_no_more(bundle, tmp_path, cli):
    file = tmp_path / "ids.json"
    file.write_text("[[5, 6, 7], [8]]")
    session = DecodeSession(bundle, threads=1)
    ends = int([*session.generate(np.array([[8]]), 4)][-1][0])
    folder = shutil.copytree(bundle, tmp_path / "bundle")
    (folder / ENDS).write_text(json.dumps({"eos_token_id": ends}))
    write_manifest(folder, manifest_content(folder))
    found = cli("generate", folder, "--prompts", file, "--count", "6")
    for ids, line in zip([[5, 6, 7], [8]], found.stdout.splitlines(), strict=True):
        tokens = session.generate(np.array([ids]), 6, stop=[ends])
        assert json.loads(line) == {"ids": [int(token[0]) for token in tokens if token[0] >= 0]}


def test_text_ends_before_a_stop_text(bundle, cli):
    whole = cli("generate", bundle, "--prompt", "TO BE", "--count", "20").stdout[:-1]
    stop = whole[5:8]  # spans tokens, which are characters
    said = cli("generate", bundle, "--prompt", "TO BE", "--count", "20", "--stop", stop)
    assert said.stdout == whole[: whole.index(stop)] + "\n"


@pytest.mark.parametrize(
    ("pieces", "stops", "wanted"),
    [
        ("ab cd", ["cd"], "ab "), ("aab", ["ab"], "a"), ("abac", ["abad"], "abac"),
        ("xENDy", ["DyZ", "END"], "x"), ("a", ["aa"], "a"), ("ababac", ["abac"], "ab"),
    ],
)  # fmt: skip
def test_stop_texts_may_span_pieces(pieces, stops, wanted):
    for size in (1, 2, len(pieces)):
        cut = (pieces[at : at + size] for at in range(0, len(pieces), size))
        assert "".join(until(cut, stops)) == wanted


def test_a_line_of_json_gives_a_ci_system_no_command():
    value = {"text": "::a::\x1b ##[error] é"}
    assert json.loads(json_line(value)) == value
    assert json_line(value).isascii()
    assert json_line(value).isprintable()
    assert "##[" not in json_line(value)


def test_steps_are_run_as_far_as_they_are_read():
    ran = []

    def steps():
        for at in range(9):
            ran.append(at)
            yield np.array([at, at if at < 2 else -1])

    first, second = rows_of(steps(), 2)
    assert [next(first), next(first)] == [0, 1]
    assert ran == [0, 1]
    assert [*second] == [0, 1]


def test_a_special_token_is_a_stop_text(tmp_path):
    tokenizer_of(CHATML).save_pretrained(tmp_path)
    text = BundleText(tmp_path)
    (end,) = text.special_ids("<|im_end|>")
    assert text.encode("<|im_end|>") == [end]
    assert text.special_ids("A") == text.special_ids("AB") == []


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ("[]", (), "Expected `array` of length >= 1"), ("{", (), "cannot be read"),
        ('[[1, "a"]]', (), "cannot be read"), ("[[]]", (), "cannot be read"),
        ('[[1, {"role": "user"}]]', (), "prompt 1 is"), ('[["a"]]', (), "cannot be read"),
        ('[{"role": "user", "content": "A"}]', (), "give --chat"),
        ('[{"a": 1}]', (), "prompt 1 is"), ("[1, 2]", ("--chat",), "--chat is for text"),
        ("[1]", ("--stop", "A"), "--stop is for text"),
        ('["A"]', ("--stop", ""), "--stop is empty"),
        ('["A"]', ("--ids", "1"), "give one of --prompt"), (None, (), "No such file"),
    ],
)  # fmt: skip
def test_what_a_file_of_prompts_may_not_hold_is_one_line(
    content, words, message, bundle, tmp_path, cli
):
    file = tmp_path / "prompts.json"
    if content is not None:
        file.write_text(content)
    said = cli("generate", bundle, "--prompts", file, *words)
    assert (said.returncode, said.stdout, said.stderr.count("\n")) == (2, "", 1)
    assert message in said.stderr
