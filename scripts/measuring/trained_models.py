"""Tiny decoders of real structure, trained for minutes on the bytes of this repository's pages."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

DOCS = Path(__file__).parents[2] / "docs"

_SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_HEAD = {"head_dim": 16}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": _HEAD,
    "gemma3_text": {
        **_HEAD, "query_pre_attn_scalar": 16, "sliding_window": 64,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    },
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 6, "n_positions": 256},
    "olmo": {"num_key_value_heads": 4},
    "phi3": {"original_max_position_embeddings": 256},
}  # fmt: skip
"""The types of models, with their fields beside `_SMALL`."""

_LENGTH, _BATCH, _RATE = 128, 12, 3e-3
_WARM_UP = 30
"""The steps until the full rate."""


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of the pages to train on, and those of every eighth page, held out.

    What `scripts/bench_fit` writes is none of them.
    """
    pages = sorted(page for page in DOCS.rglob("*.md") if page.name != "fit.md")
    held = [page for number, page in enumerate(pages) if number % 8 == 3]
    parts = ([page for page in pages if page not in held], held)
    train, other = (b"\n".join(page.read_bytes() for page in part) for part in parts)
    return np.frombuffer(train, np.uint8), np.frombuffer(other, np.uint8)


def windows(text: np.ndarray, count: int, length: int, seed: int) -> np.ndarray:
    """Return parts of a text at random places, int64 `[count, length]`."""
    starts = np.random.default_rng(seed).integers(0, len(text) - length, count)
    return np.stack([text[start : start + length] for start in starts]).astype(np.int64)


def train(kind: str, folder: Path, seconds: float) -> Iterator[str]:
    """Train a model for some seconds of one processor and save it; yield what it has reached."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = CONFIG_MAPPING[kind](**{**_SMALL, **KINDS[kind]})
    models: Any = AutoModelForCausalLM
    model = models.from_config(config, attn_implementation="sdpa").train()
    optimiser = torch.optim.AdamW(model.parameters(), _RATE, betas=(0.9, 0.95), weight_decay=0.1)
    text, held_out = texts()
    start, step, done = time.process_time(), 0, 0.0
    while done < 1:
        rate = min(step / _WARM_UP, 1.0) * (0.05 + 0.95 * math.cos(math.pi / 2 * done) ** 2)
        for group in optimiser.param_groups:
            group["lr"] = _RATE * rate
        ids = torch.from_numpy(windows(text, _BATCH, _LENGTH, step))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        step, done = step + 1, (time.process_time() - start) / seconds
        if step % 100 == 0:
            yield f"{kind}: step {step}, {loss.item():.2f} nats a byte"
    model.eval()
    with torch.inference_mode():
        ids = torch.from_numpy(windows(held_out, 32, _LENGTH, 0))
        loss = model(input_ids=ids, labels=ids).loss.item()
    model.save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    yield f"{kind}: {step} steps, {loss:.2f} nats a byte of held-out text"


def _tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are bytes."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = [chr(b) for b in range(256)]
    # The alphabet stands for bytes that are not printable by other characters.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(sorted(set(names) - {of_bytes[b] for b in printable}))
    vocabulary = {of_bytes[b] if b in printable else next(spare): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
