"""The user's own inputs of a whole model: arrays by name, and prompts as ids or text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.errors import UsageError, counted, printable
from attn_export.export.given_inputs import OWN, GivenInputs, fitting, read_given
from attn_export.interface import PAST
from attn_export.parts.whole_models.bundle_text import BundleText
from attn_export.parts.whole_models.export_layouts import End, Entry, Promise
from attn_export.parts.whole_models.model_cases import CaseLimits, CaseMaker
from attn_export.results import Case

_TOGETHER = 8
"""The most prompts that are one batch."""

_Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class OwnInputs:
    """The user's own inputs, for all graphs of a model.

    Attributes:
        given: What was read, with prompts as ids.
        pad: The token that prompts of unequal length are padded with.
    """

    given: tuple[GivenInputs, ...] = ()
    pad: int = 0

    def cases(
        self, maker: CaseMaker, promises: frozenset[Promise], *, pads_any: bool = False
    ) -> Iterator[Case]:
        """Yield the cases of a graph: each set and each prompt, and prompts in batches.

        `pads_any`: Whether prompts are padded on the right without a mask, as nothing reads that.
        """
        number = 0
        for given in self.given:
            ids = maker.entry.one("ids")
            for arrays in given.sets:
                number += 1
                if _missing(maker.entry, arrays) is None:
                    yield self._case(maker, f"{OWN}{number}", given.source, arrays, promises)
            first = number + 1
            prompts = [prompt for prompt in given.prompts if not isinstance(prompt, str)]
            number += len(prompts)
            if ids is None or _missing(maker.entry, {ids.name: prompts}) or not prompts:
                continue
            if maker.entry.takes_one_token:
                prompts = [prompt for prompt in prompts if len(prompt) == 1]
            for at, prompt in enumerate(prompts, start=first):
                source = f"{given.source}, prompt {at - first + 1}"
                array = {ids.name: np.array([prompt])}
                yield self._case(maker, f"{OWN}{at}", source, array, promises)
            for at in range(0, len(prompts) if "batch" in promises else 0, _TOGETHER):
                some = prompts[at : at + _TOGETHER]
                together = self._together(maker.entry, some, promises, pads_any=pads_any)
                if together:
                    names = f"{first + at}_to_{first + at + len(some) - 1}"
                    source = f"{given.source}, prompts {at + 1} to {at + len(some)}"
                    yield self._case(maker, f"{OWN}{names}", source, together, promises)

    def _together(
        self, entry: Entry, prompts: Sequence[list[int]], promises: frozenset[Promise], *,
        pads_any: bool,
    ) -> _Arrays | None:  # fmt: skip
        """Return prompts in one batch; None if they cannot be padded."""
        ids, mask = entry.one("ids"), entry.one("mask")
        lengths = np.array([len(prompt) for prompt in prompts])
        uneven, longest = len({*lengths}) > 1, int(lengths.max())
        sides = {"left", "right"} & promises if mask is not None else set()
        if len(prompts) < 2 or ids is None or (uneven and not sides and not pads_any):
            return None
        at = np.arange(longest)
        is_left = "left" in sides
        kept = at >= longest - lengths[:, None] if is_left else at < lengths[:, None]
        tokens = np.full(kept.shape, self.pad)
        tokens[kept] = np.concatenate(prompts)
        return {ids.name: tokens} | ({mask.name: kept.astype(np.int64)} if mask else {})

    def _case(
        self, maker: CaseMaker, name: str, source: str, arrays: _Arrays,
        promises: frozenset[Promise],
    ) -> Case:  # fmt: skip
        """Return the case of a set of arrays; raise UsageError if a graph does not take them."""
        entry, source = maker.entry, printable(source, 150)
        ends = {meant: end for end in entry.inputs.values() for meant in (end.usual, end.name)}
        given = {
            end.name: fitting(value, end.name, end.dtype, maker.axes[end.name], source, "the graph")
            for named, value in arrays.items() if (end := ends.get(named)) is not None
        }  # fmt: skip
        pasts = [end.name for end in entry.having("past") if end.of == "decoder"]
        lacking = [each for each in pasts if each not in given]
        if 0 < len(lacking) < len(pasts):
            raise UsageError(
                f"--inputs {source} lacks {printable(lacking[0], 60)}; give all caches"
            )
        for end in entry.inputs.values():
            if end.name in given:
                _check_values(end, given[end.name], maker.limits, source)
        following = {
            name for name in given if _follows(entry.inputs[name], grows=PAST in maker.axes[name])
        }  # fmt: skip
        case = maker.own(name, source, {n: a for n, a in given.items() if n not in following})
        for each in following:
            if not np.array_equal(given[each], case.inputs[each]):
                raise UsageError(
                    f"--inputs {source}: {printable(each, 60)} follows from the others here; leave "
                    "it out"
                )
        most = maker.limits.positions
        if _length(entry, case) > most:
            raise UsageError(
                f"--inputs {source}: {_length(entry, case)} tokens, and the model takes {most}; "
                "give fewer"
            )
        for promise, text in _asked(entry, case):
            if promise not in promises:
                raise UsageError(
                    f"--inputs {source}: {text}, which this layout does not promise; give each "
                    "sequence alone"
                )
        return case


def read_own(
    sources: Sequence[Any], entries: Sequence[Entry], model: Any, folder: Path | None
) -> OwnInputs:
    """Read the user's own inputs; raise UsageError if no graph takes them.

    `folder`: That of the model, for its tokenizer.
    """
    ends = [end for entry in entries for end in entry.inputs.values()]
    names = list(dict.fromkeys(name for end in ends for name in (end.name, end.usual)))
    found = []
    for given_source in sources:
        given = read_given(given_source, names, takes_prompts=True)
        source = given.source
        for arrays in given.sets:
            _refuse_unused(given.source, arrays, entries)
        if given.prompts:
            prompts = tuple(_with_ids(given, folder))
            usable = [e for e in entries if (ids := e.one("ids")) and not _missing(e, [ids.name])]
            if not usable:
                raise UsageError(
                    f"--inputs {source}: no graph takes token ids alone; give FILE.npz with arrays "
                    "by name"
                )
            if all(e.takes_one_token for e in usable) and not any(len(p) == 1 for p in prompts):
                raise UsageError(
                    f"--inputs {source}: the graph takes one token at a time, after a past; give "
                    "FILE.npz with the caches"
                )
            given = dataclasses.replace(given, prompts=prompts)
        found.append(given)
    config = model.config.get_text_config(decoder=True)
    pad, size = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", 0) or 0
    return OwnInputs(tuple(found), pad if isinstance(pad, int) and 0 <= pad < size else 0)


def own_notes(own: OwnInputs) -> tuple[str, ...]:
    """Return notes on what was given."""
    return tuple(
        f"own inputs: {counted(len(each.prompts), 'prompt')} of {printable(each.source, 120)}, "
        "each alone, and in batches where the graph takes padding"
        if each.prompts
        else f"own inputs: {counted(len(each.sets), 'set')} of {printable(each.source, 120)}"
        for each in own.given
    )


def _with_ids(given: GivenInputs, folder: Path | None) -> Iterator[list[int]]:
    """Yield prompts as ids; texts by the tokenizer of the model."""
    text: BundleText | None = None
    for prompt in given.prompts:
        if not isinstance(prompt, str):
            yield prompt
            continue
        if folder is None:
            raise UsageError(
                f"--inputs {given.source}: text needs the folder of a model with a tokenizer.json; "
                "give token ids"
            )
        text = text or BundleText(folder)
        yield text.encode(prompt)


def _missing(entry: Entry, names: Sequence[str] | _Arrays) -> str | None:
    """Return a main input of a graph that is not given, or None."""
    for end in entry.inputs.values():
        is_main = end.role in ("ids", "features", "states")
        is_main |= end.role == "past" and end.of == "encoder"
        if is_main and end.name not in names and end.usual not in names:
            return end.name
    return None


def _refuse_unused(source: str, arrays: _Arrays, entries: Sequence[Entry]) -> None:
    missing = [_missing(entry, arrays) for entry in entries]
    if all(missing):
        raise UsageError(
            f"--inputs {source} lacks {printable(missing[0], 60)}, which {entries[0].path} reads"
        )


def _follows(end: End, *, grows: bool) -> bool:
    """Return whether an input follows from others; so do caches of a fixed size, which are free."""
    if end.role == "past" and end.of == "decoder":
        return not grows
    return end.role in ("branch", "window", "write at", "lengths")


def _check_values(end: End, array: np.ndarray, limits: CaseLimits, source: str) -> None:
    """Raise UsageError if an array holds a value that has no meaning."""
    most = limits.vocabulary - 1 if end.role == "ids" else 1
    of_mask = end.role in ("mask", "states mask")
    if not array.size and end.role in ("ids", "features", "states", "mask"):
        raise UsageError(f"--inputs {source}: {printable(end.name, 60)} is empty")
    if not (end.role == "ids" or of_mask):
        return
    bad = array[(array < 0) | (array > most)]
    if bad.size:
        raise UsageError(
            f"--inputs {source}: {printable(end.name, 60)} holds {bad.flat[0]}; the model takes 0 "
            f"to {most}"
        )
    if of_mask and not array.any(-1).all():
        raise UsageError(f"--inputs {source}: a sequence of {printable(end.name, 60)} has no token")


def _length(entry: Entry, case: Case) -> int:
    """Return the number of tokens of a case, those of the past included."""
    ids = entry.one("ids")
    return int(case.inputs[ids.name].shape[1]) + case.sizes.get(PAST, 0) if ids else 0


def _asked(entry: Entry, case: Case) -> Iterator[tuple[Promise, str]]:
    """Yield what a case asks of a layout."""
    main = entry.one("ids") or entry.one("features")
    mask = entry.one("mask")
    batch = len(case.inputs[main.name]) if main is not None else 1
    query = case.inputs[main.name].shape[1] if main is not None and main.role == "ids" else 1
    if batch > 1:
        yield "batch", "several sequences"
    if mask is not None and main is not None and main.role == "ids":
        shown = case.inputs[mask.name] != 0
        if not shown[:, 0].all():
            yield "left", "padding on the left"
        if not shown[:, -1].all():
            yield "right", "padding on the right"
    if case.sizes.get(PAST) and query > 1:
        yield ("chunks" if batch > 1 else "chunk"), "several tokens after a past"
