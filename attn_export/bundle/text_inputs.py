"""How texts become inputs of an encoder: what a checkpoint says of its tokenizer, in a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, Struct

from attn_export.errors import BundleError, UsageError, one_line
from attn_export.schema import Count
from attn_export.untrusted_files import checked, parse_json, read_text

TEXTS = "text_inputs.json"
"""The file of a bundle that says how texts are cut and padded."""

VECTOR = "sentence_embedding"
"""The output of an encoder with the vector of a text, `[batch, size]`."""

CHOICE = (VECTOR, "logits", "pooler_output", "text_embeds")
"""The outputs of an encoder that `embed` chooses from, the first of these that there is."""

_Length = Annotated[float, Meta(gt=0)]  # some write 1e30 for none


class TextInputs(Struct, frozen=True, omit_defaults=True):
    """How texts are cut and padded.

    Attributes:
        max_length: The most tokens of a text; longer ones are cut.
        vocabulary: The number of token ids.
        pad_id: The token of padding.
        padding_side: Where shorter texts of a batch are padded.
        lower_case: Whether texts are in lower case before they are cut into tokens.
        prompts: Texts that may be put before each text, by name.
        prompt: The name of the one that is by default.
    """

    max_length: Annotated[int, Meta(ge=1, le=2**31)]
    vocabulary: Count
    pad_id: Count = 0
    padding_side: Literal["left", "right"] = "right"
    lower_case: bool = False
    prompts: dict[str, str] = {}
    prompt: str | None = None


class _TokenizerConfig(Struct, frozen=True):
    model_max_length: _Length | None = None
    padding_side: Literal["left", "right"] = "right"


class _SentenceConfig(Struct, frozen=True):
    max_seq_length: _Length | None = None
    do_lower_case: bool = False


class _Prompts(Struct, frozen=True):
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None


def text_inputs_of(
    checkpoint: Path | None, positions: int, vocabulary: int, pad_id: int
) -> TextInputs:
    """Return what a checkpoint says, also as sentence-transformers writes it.

    `positions`: The most tokens that the model takes.
    """
    tokenizer, sentence, said = _TokenizerConfig(), _SentenceConfig(), _Prompts()
    if checkpoint is not None:
        tokenizer = _read(checkpoint / "tokenizer_config.json", _TokenizerConfig)
        sentence = _read(checkpoint / "sentence_bert_config.json", _SentenceConfig)
        said = _read(checkpoint / "config_sentence_transformers.json", _Prompts)
    longest = sentence.max_seq_length or tokenizer.model_max_length or positions
    return TextInputs(
        max(int(min(longest, positions)), 1), vocabulary, pad_id, tokenizer.padding_side,
        sentence.do_lower_case, said.prompts, said.default_prompt_name,
    )  # fmt: skip


def read_text_inputs(bundle: Path) -> TextInputs:
    """Return what a bundle says."""
    if not (bundle / TEXTS).is_file():
        raise UsageError(
            f"{bundle} is no bundle of an encoder of texts with {TEXTS}; build it anew"
        )
    return _read(bundle / TEXTS, TextInputs)


_S = TypeVar("_S", bound=Struct)


def _read(path: Path, schema: type[_S]) -> _S:
    """Return the content of a file; the default of a schema if a checkpoint lacks it."""
    try:
        return checked(parse_json(read_text(path)) if path.is_file() else {}, schema)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {one_line(error)}") from error
