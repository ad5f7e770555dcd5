"""The page of a whole model's kit, in a browser: it generates from ids and from text."""

from __future__ import annotations

import re

import numpy as np
import pytest
from chromium_page import Page
from javascript_kits import kit_of, served
from shared import extended
from tiny_decoders import built

from attn_export import DecodeSession
from attn_export.parts.whole_models.bundle_text import BundleText

DONE = "document.body.dataset.state !== 'running'"
FORM = "!document.getElementById('generator').hidden"
SAYS = "document.getElementById('generation-says').textContent"
GENERATED = "document.getElementById('generated').textContent"
COUNT = 30


def submit(page: Page, kind: str, prompt: str, count: int) -> str:
    """Fill in the form and submit it; return what it says at the end."""
    page.evaluate(
        f"(([kind, prompt, count]) => {{ const form = document.getElementById('prompt-form');"
        " form.elements['prompt-is'].value = kind; form.elements.prompt.value = prompt;"
        " form.elements['most-tokens'].value = count; form.requestSubmit(); })"
        f"({[kind, prompt, str(count)]!r})"
    )
    page.wait("document.querySelector('#prompt-form button').textContent === 'Generate'")
    says: str = page.evaluate(SAYS)
    return says


@pytest.mark.xdist_group("test_web")
@pytest.mark.parametrize("engine", extended(["wasm", "webgpu"], lambda name: name == "wasm"))
def test_the_page_generates_from_ids_and_from_text(engine, need, tmp_path):
    need(engine)
    kit = kit_of("web", built("mistral"), tmp_path, "web")
    with served(kit) as address, Page() as page:
        page.open(f"{address}?engine={engine}")
        page.wait(f"{DONE} && {FORM}", 120)
        if engine == "wasm":  # sines on WebGPU are wrong by 1e-5
            assert page.evaluate("document.body.dataset.state") == "passed"
        check(page)


def check(page: Page) -> None:
    session, text = DecodeSession(built("mistral"), threads=1), BundleText(built("mistral"))
    ids = text.encode("NOT")
    tokens = [
        int(row[0]) for row in session.generate(np.array([ids]), COUNT, stop=text.generation.ends)
    ]
    speed = rf"{len(tokens)} tokens: the first after \d+ ms, then \d+\.\d tokens/s"
    assert re.fullmatch(speed, submit(page, "ids", ",".join(map(str, ids)), COUNT))
    assert page.evaluate(GENERATED) == " ".join(map(str, tokens))
    assert re.fullmatch(speed, submit(page, "text", "NOT", COUNT))
    assert page.evaluate(GENERATED) == "".join(text.decode(ids, tokens))
    for kind, prompt, count, says in (
        ("ids", "1,64", 3, "there is no token 64; ids are 0 to 63"),
        ("ids", "", 3, "the prompt has no token"),
        ("text", "é", 3, "the prompt has no token"),
        ("ids", "1,2", 40, "2 tokens and 40 more: the bundle takes 40"),
    ):
        assert submit(page, kind, prompt, count) == f"Cannot generate: {says}"
    assert page.errors == []
    page.look(360)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
