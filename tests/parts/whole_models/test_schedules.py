"""Random schedules of a `DecodeSession` with whole models, against one full pass in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_decoders import built, checkpoint_of
from transformers import AutoModelForCausalLM

from attn_export import DecodeSession

MOST = 40
"""The most tokens of the tiny models."""

KINDS: dict[str, dict[str, Any]] = {
    "mistral": {},
    # Else its scores are scaled by the longest past of the batch.
    "llama4_text": {"attn_temperature_tuning": False},
    "gpt2": {}, "gemma3_text": {}, "gpt_oss": {},
}  # fmt: skip
"""Types with a window, chunks, learned positions, two kinds of layers, sinks and experts."""


class Schedule:
    """A random schedule: sessions, with the tokens of each batch element.

    `model`: The model in float64.
    """

    def __init__(self, session: DecodeSession, model: Any, random: np.random.Generator) -> None:
        self.model, self.random, self.said = model, random, list[str]()
        self.live: list[tuple[DecodeSession, list[list[int]]]] = []
        self.prefill(session)

    def prefill(self, session: DecodeSession) -> None:
        lengths = self.random.integers(1, 12, self.random.integers(1, 4))
        texts = [self.random.integers(3, 64, n).tolist() for n in lengths]
        width = int(lengths.max())
        left = bool(self.random.integers(2))
        ids, mask = np.full((2, len(texts), width), 63)
        for row, text in enumerate(texts):
            at = slice(width - len(text), None) if left else slice(len(text))
            mask[row], ids[row, at] = 0, text
            mask[row, at] = 1
        self.live = [(session, texts)]
        self.said = [f"prefill {lengths.tolist()} {'left' if left else 'right'}"]
        self.check(session.prefill(ids, attention_mask=mask)["logits"], texts)

    def act(self) -> None:
        """Do one random thing."""
        number = int(self.random.integers(len(self.live)))
        session, texts = self.live[number]
        room = MOST - max(map(len, texts))
        action = str(self.random.choice(["step", "step", "chunk", "reorder", "rewind", "fork"]))
        if action in ("step", "chunk") and room:
            count = 1 if action == "step" else int(self.random.integers(1, min(room, 6) + 1))
            new = self.random.integers(3, 64, (len(texts), count))
            self.say(number, f"{action} {count}")
            index = np.tile(np.arange(count), (len(texts), 1))
            logits = session.step(new, logit_index=index)["logits"]
            self.live[number] = session, [t + n.tolist() for t, n in zip(texts, new, strict=True)]
            self.check(logits, self.live[number][1])
        elif action == "reorder":
            rows = self.random.integers(0, len(texts), self.random.integers(1, 4)).tolist()
            self.say(number, f"reorder {rows}")
            session.reorder(rows)
            self.live[number] = session, [texts[row] for row in rows]
        elif action == "rewind":
            counts = [int(self.random.integers(0, min(len(t), 9))) for t in texts]
            self.say(number, f"rewind {counts}")
            session.rewind(counts)
            kept = [t[: len(t) - count] for t, count in zip(texts, counts, strict=True)]
            self.live[number] = session, kept
        elif action == "fork" and len(self.live) < 3:
            rows = self.random.integers(0, len(texts), self.random.integers(1, 4)).tolist()
            self.say(number, f"fork {rows}")
            self.live.append((session.fork(rows), [list(texts[row]) for row in rows]))

    def say(self, number: int, text: str) -> None:
        self.said.append(f"{number}: {text}")

    def check(self, logits: np.ndarray, texts: list[list[int]]) -> None:
        """Compare the logits of the last tokens with those of one pass over all tokens."""
        for got, text in zip(logits, texts, strict=True):
            with torch.inference_mode():
                whole = self.model(torch.tensor([text]), use_cache=False).logits[0]
            wanted = whole[-len(got) :].numpy()
            error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
            assert error < 2e-5, f"{error:.2g} after {'; '.join(self.said)}"


@pytest.mark.parametrize(
    ("kind", "count"),
    [("mistral", 12), *(pytest.param(kind, 400, marks=pytest.mark.extended) for kind in KINDS)],
)
def test_random_schedules_give_what_one_pass_gives(kind, count):
    bundle = built(kind, **KINDS[kind])
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of(bundle), dtype=torch.float32)
    model.set_experts_implementation("eager")  # the others have no float64
    session = DecodeSession(bundle, block=8, threads=1)
    precise = model.double()
    for seed in range(count):
        schedule = Schedule(session, precise, np.random.default_rng(seed))
        for _ in range(10):
            schedule.act()
