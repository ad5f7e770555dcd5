"""Text of a bundle of a whole model: its tokenizer, and the tokens at which a text ends."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from attn_export.bundle.text_ends import ENDS, TOKENIZER, Generation, read_generation
from attn_export.bundle.text_inputs import TEXTS, TextInputs, text_inputs_of
from attn_export.errors import BundleError, GraphError, UsageError, one_line
from attn_export.parts.whole_models.chat_template import CHAT, Messages, read_template, rendered
from attn_export.parts.whole_models.sound import SOUND, read_sound
from attn_export.runtimes.child import Child, ChildFailedError, child_command, limited
from attn_export.runtimes.child_main import Jobs, Send
from attn_export.runtimes.protocol import Limits
from attn_export.system_info import check_installed
from attn_export.untrusted_files import read_bytes

_MOST_BYTES = 2**26
"""The largest size of a tokenizer."""

_MOST_LENGTH = 2**20
"""The most tokens of a prompt, and the most characters of few tokens."""

_MOST_MIB = 2**11
"""The memory of a process with a tokenizer."""

_TEMPLATE_SECONDS = 10.0
"""The time in which a chat template must render messages."""

_STARTS = (
    "bos_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id",
    "suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids",
)  # fmt: skip
"""What a config may say of an encoder-decoder, where its generation config does not."""

_BROKEN = "\ufffd"
"""What stands for bytes that are no character yet."""

_CONTEXT = 6
"""The number of tokens before the first new one that it is decoded with, as spaces depend on it."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts, or pairs of them, as tokens.

    Attributes:
        ids: The ids of the tokens of each.
        types: Their types: 1 in the second text of a pair, if the tokenizer says so.
        cut: The number of those that were longer than allowed.
    """

    ids: list[list[int]]
    types: list[list[int]]
    cut: int


class BundleText:
    """The tokenizer of a bundle, which a process with limits reads and runs: it is native code.

    Attributes:
        generation: The tokens that begin and end a text, and how tokens are drawn.
        sound: How features are made of sound, or None.
    """

    def __init__(self, bundle: Path) -> None:
        self._path = bundle / TOKENIZER
        self._template, self.sound = read_template(bundle), read_sound(bundle)
        self._child: Child | None = None
        self.generation = read_generation(bundle)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self._encoded(text=text)

    def encode_chat(self, messages: Messages) -> list[int]:
        """Return the token ids of messages by the chat template, as transformers has them."""
        if self._template is None:
            raise UsageError(
                f"{self._path.parent} has no chat template; leave --chat out, or build it of a "
                f"checkpoint whose {CHAT} has one"
            )
        given = {"template": self._template.chat_template, "tokens": self._template.tokens}
        text = self._asked("chat template", _TEMPLATE_SECONDS, messages=messages, **given)
        return self._encoded(text=text, is_whole=True)

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer."""
        return self._path.is_file()

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None

    def special_ids(self, text: str) -> list[int]:
        """Return the id of a special token, which is in no decoded text, or none."""
        ids: list[int] = self._asked(text=text, is_whole=True)
        return ids if len(ids) == 1 and not self._asked(ids=[ids])[0] else []

    def _encoded(self, **job: Any) -> list[int]:
        ids: list[int] = self._asked(**job)
        if not ids:
            raise UsageError("the prompt has no token; give a text")
        return ids

    def encode_all(self, texts: Sequence[Sequence[str]], how: TextInputs) -> Texts:
        """Return the tokens of texts, or of pairs of texts."""
        cased = [[text.lower() for text in each] if how.lower_case else [*each] for each in texts]
        return Texts(**self._asked(texts=cased, length=how.max_length))

    def decode(self, before: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text of tokens as it grows; bytes wait until they are a character.

        `before`: The tokens before them.
        """
        ids = list(before[-_CONTEXT:])
        start, shown = 0, len(ids)
        for token in tokens:
            ids.append(token)
            old, new = self._asked(ids=[ids[start:shown], ids[start:]])
            if len(new) > len(old) and not new.endswith(_BROKEN):
                yield new[len(old) :]
                start, shown = shown, len(ids)
        old, new = self._asked(ids=[ids[start:shown], ids[start:]])
        yield new[len(old) :]

    def _asked(self, by: str = "tokenizer", seconds: float | None = None, **job: Any) -> Any:
        """Return what the process makes of a text, of messages, or of lists of ids."""
        limits = dataclasses.replace(Limits.default(), memory_mib=_MOST_MIB)
        try:
            if self._child is None:
                if not self._path.is_file():
                    raise UsageError(f"{self._path.parent} has no {TOKENIZER}; give token ids")
                _refuse_large(self._path)
                command = child_command(f"{__name__}:_serve", limits, str(self._path))
                self._child = Child(command)
                weakref.finalize(self, self._child.close)
                self._child.receive(limits.seconds)
            self._child.send(job)
            return self._child.receive(seconds or limits.seconds)["value"]
        except ChildFailedError as error:
            if self._child is not None:
                self._child.close()
                self._child = None
            kind = UsageError if error.kind == UsageError.__name__ else BundleError
            if error.kind:
                raise kind(str(error)) from error
            what = "tokens" if "ids" in job else "messages" if "messages" in job else "text"
            raise BundleError(f"{self._path.parent}: its {by}, given {what}, {error}") from error


def files_of(model: Any, checkpoint: Path | None, positions: int) -> dict[str, bytes]:
    """Return what `generate` or `embed` needs besides the graphs: files of a bundle, by name.

    `positions`: The most tokens that the model takes.
    """
    from attn_export.parts.whole_models.sentence_folder import read_sentence_folder

    files = {}
    if checkpoint is not None and (sentence := read_sentence_folder(checkpoint)):
        checkpoint = sentence.transformer
    if model.can_generate():
        said = read_generation(checkpoint) if checkpoint is not None else Generation()
        names = _STARTS if model.config.is_encoder_decoder else ()
        own = _of_model(model, "eos_token_id")
        ends = said.ends or tuple(own if isinstance(own, list) else [] if own is None else [own])
        more = {n: _of_model(model, n) for n in names if getattr(said, n) is None}
        said = msgspec.structs.replace(said, eos_token_id=ends, **more)
        files[ENDS] = msgspec.json.encode(said)
        if (sound := read_sound(checkpoint) if checkpoint is not None else None) is not None:
            files[SOUND] = msgspec.json.encode(sound)
    elif model.main_input_name == "input_ids" and not model.config.is_encoder_decoder:
        config = model.config.get_text_config()
        pad, count = getattr(config, "pad_token_id", None), config.vocab_size
        texts = text_inputs_of(checkpoint, positions, count, pad or 0)
        files[TEXTS] = msgspec.json.encode(texts)
    if checkpoint is not None and (checkpoint / TOKENIZER).is_file():
        files[TOKENIZER] = _checked_tokenizer(checkpoint / TOKENIZER)
        template = read_template(checkpoint)
        files |= {} if template is None else {CHAT: template.content()}
    return files


def _of_model(model: Any, name: str) -> Any:
    """Return what a model says, by its generation config or else by its config."""
    found = getattr(model.generation_config, name, None)
    return (
        getattr(model.config.get_text_config(decoder=True), name, None) if found is None else found
    )


def _checked_tokenizer(path: Path) -> bytes:
    """Return a tokenizer's file, which a process with limits has read before."""
    check_installed("tokenizers")
    _refuse_large(path)
    try:
        limited(f"{__name__}:_loaded", str(path), path=str(path), only_tried=True)
        return read_bytes(path, _MOST_BYTES)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    except GraphError as error:
        raise BundleError(str(error)) from error


def _refuse_large(path: Path) -> None:
    if path.stat().st_size > _MOST_BYTES:
        raise BundleError(f"{path} is larger than {_MOST_BYTES >> 20} MiB")


# -- in the process with limits -----------------------------------------------------------------


def _loaded(path: str, *, only_tried: bool = False) -> Any:
    """Return a tokenizer; it is native code, and may crash."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # as the package raises them
        raise BundleError(f"{path} is no tokenizer: {one_line(error)}") from error
    return None if only_tried else tokenizer


def _serve(send: Send, jobs: Jobs, path: str) -> None:
    """Encode texts, render messages, and decode lists of ids."""
    tokenizer = _loaded(path)
    send("returned", value=None)
    while True:
        job = jobs.get()
        if "messages" in job:
            send("returned", value=rendered(**job))
            continue
        try:
            if "texts" in job:
                value: Any = _encoded(tokenizer, job["texts"], job["length"])
                send("returned", value=value)
                continue
            if "text" in job:
                # A template has written the special tokens.
                is_whole = job.get("is_whole", False)
                value = tokenizer.encode(job["text"], add_special_tokens=not is_whole).ids
            else:
                value = [tokenizer.decode(ids) for ids in job["ids"]]
        except Exception as error:  # as the package raises them
            raise UsageError(f"{path} refuses the text: {one_line(error)}") from error
        if max([len(value), *(len(x) for x in value if isinstance(x, str))]) > _MOST_LENGTH:
            raise UsageError(f"{path} makes more than {_MOST_LENGTH} tokens or characters of it")
        send("returned", value=value)


def _encoded(tokenizer: Any, texts: list[list[str]], length: int) -> dict[str, Any]:
    """Return the tokens of texts as `Texts` has them, each cut to a length."""
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    found = tokenizer.encode_batch_fast([x[0] if len(x) == 1 else (*x,) for x in texts])
    return {
        "ids": [each.ids for each in found], "types": [each.type_ids for each in found],
        "cut": sum(bool(each.overflowing) for each in found),
    }  # fmt: skip
