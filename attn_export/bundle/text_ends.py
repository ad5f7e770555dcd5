"""What a generation config says: the ids that begin and end a text, and how tokens are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from attn_export.errors import BundleError, one_line
from attn_export.schema import Count
from attn_export.untrusted_files import checked, parse_json, read_text

ENDS = "generation_config.json"
"""The file of a bundle or a checkpoint with the ids that end a text, and with settings of draws."""

TOKENIZER = "tokenizer.json"
"""The file of a bundle or a checkpoint with a tokenizer of the package `tokenizers`."""

_UNUSED = frozenset({
    "bad_words_ids", "diversity_penalty", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "guidance_scale", "length_penalty", "min_length",
    "min_new_tokens", "min_p", "no_repeat_ngram_size", "num_beams", "penalty_alpha",
    "return_timestamps", "sequence_bias", "stop_strings", "top_h", "typical_p",
    "watermarking_config",
})  # fmt: skip
"""The settings of transformers that change tokens, and that `generate` does not have."""

_NO_EFFECT: tuple[Any, ...] = (None, False, 0, 1, [], {})
"""Their values that change no tokens."""


_Ids = Annotated[tuple[int, ...], Meta(max_length=100_000)]
_Forced = Annotated[tuple[tuple[Count, Count | None], ...], Meta(max_length=100)]
_ByName = Annotated[dict[Annotated[str, Meta(max_length=100)], Count], Meta(max_length=1000)]


class Generation(Struct, frozen=True, omit_defaults=True):
    """The part of a generation config that is used.

    Attributes:
        forced_decoder_ids: The ids of an encoder-decoder's first tokens by their positions, from 1;
            None is a language, which is found in the sound.
        unused: The names of settings that change tokens and are not used.
    """

    eos_token_id: Count | Annotated[tuple[Count, ...], Meta(max_length=1000)] | None = ()
    do_sample: bool | None = None
    temperature: Annotated[float, Meta(gt=0)] | None = None
    top_k: Count | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    decoder_start_token_id: Count | None = None
    bos_token_id: Count | None = None
    forced_bos_token_id: Count | None = None
    forced_eos_token_id: Count | None = None
    suppress_tokens: _Ids | None = None
    begin_suppress_tokens: _Ids | None = None
    forced_decoder_ids: _Forced | None = None
    lang_to_id: _ByName | None = None
    task_to_id: _ByName | None = None
    no_timestamps_token_id: Count | None = None
    language: Annotated[str, Meta(max_length=100)] | None = None
    task: Annotated[str, Meta(max_length=100)] | None = None
    unused: Annotated[tuple[Annotated[str, Meta(max_length=60)], ...], Meta(max_length=100)] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a text."""
        ends = self.eos_token_id
        return ends if isinstance(ends, tuple) else () if ends is None else (ends,)

    def draws(self) -> dict[str, Any]:
        """Return the options of `generate` that it stands for."""
        found: dict[str, Any] = {"repetition_penalty": self.repetition_penalty}
        if self.do_sample:
            found |= {"temperature": self.temperature or 1.0, "top_k": self.top_k}
            found["top_p"] = self.top_p
        return {name: value for name, value in found.items() if value is not None}


def read_generation(folder: Path) -> Generation:
    """Return what a generation config says, if it is there."""
    path = folder / ENDS
    if not path.is_file():
        return Generation()
    try:
        values = parse_json(read_text(path))
        if isinstance(values, dict):
            others = [n for n in sorted(_UNUSED & values.keys()) if values[n] not in _NO_EFFECT]
            values = {**values, "unused": values.get("unused", others)}
        return checked(values, Generation)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {one_line(error)}") from error
