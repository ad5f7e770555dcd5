"""Tokens of a whole model, one after the other; as a command, printed as ids or as text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import numpy as np

from attn_kit.cache_layout import is_cache
from attn_kit.decode import shape
from attn_kit.files import one_line, printable
from attn_kit.model import Model, bundle_folder
from attn_kit.settings import IDS, INPUTS, NAME, PRESENTS

TOKENIZER = "tokenizer.json"
# Spaces depend on the tokens before: new ones are decoded with so many.
CONTEXT = 6


def generate(model: Model, prompt: list[int], count: int) -> Iterator[int]:
    """Continue a prompt by the tokens with the largest logits, until one ends the text.

    Args:
        model: The loaded graphs.
        prompt: Token ids.
        count: The most tokens.

    Raises:
        ValueError: If the bundle takes no ids or not so many, or one is not in the vocabulary.
    """
    if IDS is None:
        raise ValueError("this bundle is no model that takes ids")
    vocabulary, most = IDS["vocabulary"], IDS["most"]
    if not prompt:
        raise ValueError("the prompt has no token")
    for token in prompt:
        if not 0 <= token < vocabulary:
            raise ValueError(f"there is no token {token}; ids are 0 to {vocabulary - 1}")
    capacity = len(prompt) + count - 1  # the last token is not run
    if count < 1 or capacity > most:
        raise ValueError(f"{len(prompt)} tokens and {count} more: the bundle takes {most}")
    caches = {n: np.zeros(shape(n, 0, 0, capacity), INPUTS[n]) for n in INPUTS if is_cache(n)}
    held, tokens = 0, prompt
    for _ in range(count):
        inputs = {
            "input_ids": np.array([tokens], INPUTS["input_ids"]),
            "past_length": np.array([held], INPUTS["past_length"]),
        }
        if "logit_index" in INPUTS:
            inputs["logit_index"] = np.array([[len(tokens) - 1]], INPUTS["logit_index"])
        outputs = model.run({**inputs, **caches}, in_place=True)
        caches = {n: outputs[PRESENTS[n]] for n in caches}
        held += len(tokens)
        tokens = [int(outputs["logits"][0, -1].argmax())]
        yield tokens[0]
        if tokens[0] in IDS["ends"]:
            return


def main() -> int:
    """Continue a prompt, and print what comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", help="token ids with commas, or with --text a text")
    parser.add_argument("count", type=_id, nargs="?", default=64, help="the most tokens")
    parser.add_argument("--text", action="store_true", help="needs the package tokenizers")
    options = parser.parse_args()
    try:
        if options.text:
            for piece in _continued(options.prompt, options.count):
                safe = (c if c.isprintable() or c in "\n\t" else "?" for c in piece)
                print("".join(safe), end="", flush=True)
            print()
            print("no chat template applied", file=sys.stderr)
            return 0
        prompt = [_id(word) for word in options.prompt.split(",") if options.prompt]
        for at, token in enumerate(generate(Model(), prompt, options.count)):
            print(f"{' ' if at else ''}{token}", end="", flush=True)
        print()
    except Exception as error:  # whatever the engine or the tokenizer raises
        print(f"{printable(NAME)}: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


def _continued(prompt: str, count: int) -> Iterator[str]:
    """Yield the text after a prompt as it grows; bytes wait until they are a character."""
    if not (IDS or {}).get("text"):
        raise ValueError(f"the bundle has no {TOKENIZER}; give token ids")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bundle_folder() / TOKENIZER))
    start = tokenizer.encode(prompt).ids
    ids = start[-CONTEXT:]
    first, shown = 0, len(ids)
    for token in generate(Model(), start, count):
        ids.append(token)
        old, new = tokenizer.decode(ids[first:shown]), tokenizer.decode(ids[first:])
        if len(new) > len(old) and not new.endswith("\ufffd"):
            yield new[len(old) :]
            first, shown = shown, len(ids)
    yield tokenizer.decode(ids[first:])[len(tokenizer.decode(ids[first:shown])) :]


def _id(word: str) -> int:
    return int(word) if word.isascii() and word.isdecimal() else -1


if __name__ == "__main__":
    sys.exit(main())
