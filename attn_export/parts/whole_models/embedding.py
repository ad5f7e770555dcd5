"""Vectors or scores of texts by the bundle of an encoder, in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from attn_export.bundle.manifest import read_bundle
from attn_export.bundle.text_inputs import CHOICE, read_text_inputs
from attn_export.errors import RuntimeFailure, UsageError, choose, counted, one_line, printable
from attn_export.parts.whole_models.bundle_text import BundleText
from attn_export.runtimes.decode_buffers import PREFERRED, load_session, select_graphs
from attn_export.runtimes.decode_inputs import IDS, MASK, PAST_LENGTH, QUERY_LEN, check_ids

TYPES = "token_type_ids"

_ALIKE = 0.75
"""The least length of a sequence beside the longest one of its batch."""

_AT_ONCE = 4096
"""The number of texts that are cut into tokens together."""


class Embedder:
    """An encoder that makes vectors or scores of texts.

    Args:
        bundle: The folder of a bundle that `build --model` wrote of a model of texts.
        threads: The number of threads, at most one for each core. Default: all cores.
        dialect: The dialect of the graph. Default: the fastest one that the bundle has.

    Attributes:
        output: The name of the output that is returned.
        is_by_token: Whether it has a row for each token.
        cut: The number of texts that were too long, and cut.
    """

    def __init__(
        self, bundle: Path | str, *, threads: int | None = None, dialect: str | None = None
    ) -> None:
        folder = Path(bundle)
        manifest = read_bundle(folder)
        unknown = manifest.inputs.keys() - {IDS, MASK, TYPES}
        if IDS not in manifest.inputs or PAST_LENGTH in unknown:
            advice = "use generate" if PAST_LENGTH in unknown else "give an encoder of texts"
            raise UsageError(
                f"{folder} takes {printable(', '.join(manifest.inputs), 80)}; {advice}"
            )
        if unknown:
            raise UsageError(
                f"{folder} takes {printable(', '.join(sorted(unknown)), 80)}, too, which embed "
                "does not have; give an encoder of texts"
            )
        self._texts, self.cut = read_text_inputs(folder), 0
        (file,) = select_graphs(manifest.shipped, dialect, folder, PREFERRED["cpu"])[:1]
        found = [name for name in CHOICE if name in manifest.outputs]
        by_token = [n for n, x in manifest.outputs.items() if QUERY_LEN in x.shape]
        self.output = (found or by_token or list(manifest.outputs))[0]
        self.is_by_token = self.output in by_token
        self._inputs, self._text = manifest.inputs, BundleText(folder)
        self._session = load_session(folder / file.name, threads, "cpu")

    def of_texts(
        self, texts: Sequence[Sequence[str]], batch_size: int = 32,
        advance: Callable[[], None] = lambda: None, prompt: str | None = None,
    ) -> list[np.ndarray]:  # fmt: skip
        """Return the output for each text, or pair of texts, in their order.

        `prompt`: The name of the prompt that is put before each. Default: that of the bundle.
        """
        name, known = prompt or self._texts.prompt, self._texts.prompts
        if name and name not in known:
            advice = choose(name, map(printable, known)) if known else "the model has none"
            raise UsageError(f"there is no prompt {printable(name, 80)}; {advice}")
        before = known[name] if name else ""
        texts = [(before + first, *others) for first, *others in texts]
        ids, types = list[list[int]](), list[list[int]]()
        for start in range(0, len(texts), _AT_ONCE):
            some = self._text.encode_all(texts[start : start + _AT_ONCE], self._texts)
            ids += some.ids
            types += some.types
            self.cut += some.cut
        return self.of_ids(ids, types, batch_size, advance)

    def of_ids(
        self, ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]] = (),
        batch_size: int = 32, advance: Callable[[], None] = lambda: None,
    ) -> list[np.ndarray]:  # fmt: skip
        """Return the output for each sequence of token ids, in their order.

        `types`: The types of the tokens, if there are several. Default: 0.
        `advance`: Is called after each sequence.
        """
        self._check(ids)
        rows: list[np.ndarray] = [np.zeros(0)] * len(ids)
        for chosen in _batches([len(each) for each in ids], batch_size):
            batch = self._batch([ids[n] for n in chosen], [types[n] for n in chosen if types])
            try:
                given = {name: batch[name] for name in self._inputs}
                (found,) = self._session.run([self.output], given)
            except Exception as error:  # as ONNX Runtime raises them
                raise RuntimeFailure(f"ONNX Runtime failed: {one_line(error)}") from error
            for row, number in enumerate(chosen):
                shown = batch[MASK][row] != 0 if self.is_by_token else ...
                rows[number] = found[row][shown]
                advance()
        return rows

    def _check(self, ids: Sequence[Sequence[int]]) -> None:
        most = self._texts.max_length
        for number, each in enumerate(ids, start=1):
            if not 0 < len(each) <= most:
                raise UsageError(
                    f"text {number} has {counted(len(each), 'token')}; give 1 to {most}"
                )
            check_ids(f"text {number}", np.asarray(each), self._texts.vocabulary)

    def _batch(
        self, ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]]
    ) -> dict[str, np.ndarray]:
        """Return the inputs of the graph for sequences, padded to the longest one."""
        length = max(map(len, ids))
        full = {IDS: self._texts.pad_id, MASK: 0, TYPES: 0}
        batch = {n: np.full((len(ids), length), full[n], np.int64) for n in (*self._inputs, MASK)}
        for row, each in enumerate(ids):
            at = slice(len(each))
            if self._texts.padding_side == "left":
                at = slice(length - len(each), length)
            batch[IDS][row, at], batch[MASK][row, at] = each, 1
            if TYPES in batch and types:
                batch[TYPES][row, at] = types[row]
        return batch


def _batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the indices of sequences that run together: a quarter of a batch is padding at most."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        if batch and (len(batch) == most or lengths[number] < _ALIKE * lengths[batch[0]]):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def normalised(rows: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield vectors of length 1; zeros stay."""
    for row in rows:
        size = np.linalg.norm(row.astype(np.float64), axis=-1, keepdims=True)
        yield (row / np.where(size > 0, size, 1)).astype(row.dtype)


def probabilities(rows: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the sigmoid of scores."""
    for row in rows:
        yield np.exp(-np.logaddexp(0, -row))
