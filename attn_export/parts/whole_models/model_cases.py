"""Cases of whole models: lengths, padding and pasts, by a cover of values rather than a product."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from attn_export.cases.draw import MAX_SIZE, draw_inputs, generator
from attn_export.errors import UsageError
from attn_export.export.given_inputs import solved_sizes
from attn_export.interface import BATCH, KEYS, PAST, QUERIES, TOTAL, Input, Shape
from attn_export.parts.whole_models.export_layouts import End, Entry, Promise
from attn_export.reference.stored_evidence import seed_words
from attn_export.results import BASE, CHANGED, WHOLE_DECODE, Arrays, Case
from attn_export.runtimes.decode_inputs import CAPACITY, ENCODED, LOGIT_COUNT
from attn_export.tensorfile import is_floating, numpy_dtype

SIZES: Final = (1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 128, 129, 511, 512, 513)
"""Lengths of prompts and pasts: around powers of two, where kernels and windows change."""

_SPARE: Final = (0, 1, 5, 64)
"""The number of slots of caches in place that stay free, in turns."""

_DECODED = 64
"""The number of tokens of a whole decode."""


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a batch holds.

    Attributes:
        new: The number of new tokens of each batch element.
        past: The number of keys in the cache of each.
        kind: The kind of the case.
        side: Where the new tokens of shorter batch elements are padded; pasts are on the left.
        tokens: ``"random"``, ``"largest"``, ``"equal"`` or ``"special"``.
        slots: Which slots hold tokens, if that is more than `new` and `past` say.
        sizes: The sizes of axes, of inputs of the user's own.
    """

    name: str
    about: str
    new: tuple[int, ...]
    past: tuple[int, ...]
    side: str = "left"
    tokens: str = "random"
    kind: str = "shape"
    slots: np.ndarray | None = None
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def with_equal_pasts(self) -> Situation:
        """Return the same with the longest past in all batch elements."""
        return dataclasses.replace(self, past=(max(self.past),) * len(self.past))

    def valid(self) -> np.ndarray:
        """Return which slots hold tokens, bool `[B, P + L]`."""
        if self.slots is not None:
            return self.slots
        query, past = max(self.new), max(self.past)
        new, old = np.array(self.new)[:, None], np.array(self.past)[:, None]
        at = np.arange(query)
        return np.concatenate(
            [
                np.arange(past) >= past - old,
                at < new if self.side == "right" else at >= query - new,
            ],
            axis=1,
        )


@dataclasses.dataclass(frozen=True)
class CaseLimits:
    """What the cases of a model may hold.

    Attributes:
        longest: The largest number of positions in cases.
        thresholds: Sizes at which the config changes something, such as windows.
        special: Token ids with a meaning: padding, start, end.
        tying: Token ids that random prompts leave out: routers give all experts the same score.
        window: The number of keys that a query of a layer with a window sees.
        cases: The largest number of cases of a graph.
        tokens: The largest number of new tokens of all its cases.
        positions: The number of positions that the model has.
        least: The least length of sounds.
    """

    vocabulary: int
    longest: int
    thresholds: tuple[int, ...] = ()
    special: tuple[int, ...] = ()
    tying: tuple[int, ...] = ()
    window: int = 0
    cases: int = 62
    tokens: int = 100_000
    positions: int = MAX_SIZE
    least: int = 1


def situations(
    entry: Entry, limits: CaseLimits, promises: frozenset[Promise]
) -> tuple[Situation, ...]:
    """Return the situations to judge a graph in; the first is the base case."""
    if entry.one("features") and not entry.one("ids") and not entry.having("past"):
        return tuple(_of_features(entry, limits.least))
    near = (t + d for t in limits.thresholds for d in (-1, 0, 1))
    sizes = sorted({size for size in (*SIZES, *near) if 1 <= size < limits.longest})
    batches = (2, 1, 3) if "batch" in promises else (1,)
    some = dict.fromkeys((4, 9, 33, 65, *limits.thresholds))  # a window may be one of them
    lengths = [n for n in some if 3 < n < limits.longest]
    kinds = [_even(entry, sizes, limits, promises, batches)]
    if "batch" in promises:
        kinds.append(_uneven(bool(entry.having("past")), lengths, promises))
    # In turns, so that a small number of cases has some of each kind.
    found, tokens = list[Situation](), 0
    for each in filter(None, itertools.chain(*itertools.zip_longest(*kinds))):
        count = len(each.new) * max(each.new)
        is_short = max(each.past) + max(each.new) <= limits.longest
        is_short &= max(each.new) == 1 or not entry.takes_one_token
        if is_short and len(found) < limits.cases and tokens + count <= limits.tokens:
            found.append(each)
            tokens += count
    return tuple(found)


def _of_features(entry: Entry, least: int) -> Iterator[Situation]:
    """Yield situations of images or sounds: batches, and lengths and padding where there are any.

    `least`: The least length of a sound.
    """
    yield Situation(BASE, "random numbers", (least + 4,) * 2, (0,) * 2)
    if not entry.one("mask"):
        yield from (Situation(f"batch_{n}", "numbers", (1,) * n, (0,) * n) for n in (1, 3))
        return
    at = least
    for batch, size in ((1, at), (3, at + 1), (1, at + 2), (2, 2 * at), (1, 9 * at)):
        yield Situation(f"length_{size}", "a sound", (size,) * batch, (0,) * batch)
    for new in ((at + 9, at), (2 * at, at + 1, 3 * at)):
        yield Situation(f"right_{max(new)}", "padding", new, (0,) * len(new), "right")


def _even(
    entry: Entry, sizes: list[int], limits: CaseLimits, promises: frozenset[Promise],
    batches: tuple[int, ...],
) -> Iterator[Situation]:  # fmt: skip
    """Yield situations whose batch elements all have the same lengths."""
    counts, has_past = itertools.cycle(batches), bool(entry.having("past"))

    def even(name: str, about: str, new: int, past: int, **changes: Any) -> Situation:
        batch = batches[0] if changes or name == BASE else next(counts)
        return Situation(name, about, (new,) * batch, (past,) * batch, **changes)

    # Where several batch elements cannot have several tokens after a past.
    most = 1 if has_past and "chunks" not in promises and batches[0] > 1 else limits.longest
    past = min(7, limits.longest // 2) if has_past else 0
    yield even(BASE, "random tokens", min(5, most, limits.longest - past), past)
    for tokens in ("largest", "equal", *(("special",) if limits.special else ())):
        yield even(f"{tokens}_ids", f"token ids: {tokens}", min(4, most), past // 2, tokens=tokens)
    for size in sizes:
        if has_past:
            yield even(f"past_{size}", "one token after a past", 1, size)
        else:
            yield even(f"length_{size}", "a prompt", size, 0)
    if has_past:
        yield even("no_past", "a prompt", 1 if entry.takes_one_token else 6, 0)
    if has_past and "chunk" in promises:
        steps = min(_DECODED, limits.longest)
        lengths = (steps, steps - 3)[: len(batches)] if "chunks" in promises else (steps,)
        lengths = lengths if "left" in promises else (steps,) * len(lengths)
        yield Situation(
            f"{WHOLE_DECODE}_{steps}", "decoded step by step, from a prompt", lengths,
            (0,) * len(lengths), kind=WHOLE_DECODE,
        )  # fmt: skip
    if has_past and "chunk" in promises:
        counts = counts if "chunks" in promises else itertools.cycle((1,))
        for new, past in zip((2, 9, 3, 8, 65, 5), sizes[::2], strict=False):
            yield even(f"chunk_{new}_{past}", "several tokens after a past", new, past)


def _uneven(
    has_past: bool, lengths: list[int], promises: frozenset[Promise]
) -> Iterator[Situation]:
    """Yield situations with padding, or with pasts of unequal length."""
    for number, size in enumerate(lengths):
        some = (size - 3, size, 1) if number % 2 else (size - 2, size)
        ones, none = (1,) * len(some), (0,) * len(some)
        if "left" in promises and has_past:
            yield Situation(f"left_past_{size}", "padding on the left of the past", ones, some)
        elif "left" in promises:
            yield Situation(f"left_{size}", "padding on the left", some, none)
        if "right" in promises:
            yield Situation(f"right_{size}", "padding on the right", some, none, "right")
        if "ragged" in promises and has_past:
            yield Situation(
                f"pasts_{size}", "pasts of unequal length", (1, 1, 1), (size, size - 3, 0)
            )


def prompts(limits: CaseLimits) -> Iterator[Situation]:
    """Yield first prompts, which have a form of their own in some graphs."""
    for size, batch in ((2, 3), (9, 1), (33, 3), (65, 2), (129, 1), (513, 1)):
        if size <= limits.longest and size * batch * 4 <= limits.tokens:
            yield Situation(f"prompt_{size}", "a first prompt", (size,) * batch, (0,) * batch)


def across(limits: CaseLimits) -> Iterator[Situation]:
    """Yield situations with more keys than each window and chunk of the config."""
    for size in limits.thresholds:
        if 2 < size <= limits.positions - 6:
            pasts = (size - 2, size + 1, 0)
            yield Situation(f"across_{size}", "tokens across a window or chunk", (5,) * 3, pasts)
        elif size < limits.positions:
            yield Situation(f"across_{size}", "more keys than a window or chunk", (1,), (size,))


class CaseMaker:
    """Makes the inputs of a graph in a situation.

    `entry`: The graph.
    `axes`: The shape of every input and output, with the names of dynamic axes.
    `pads_left`: Whether batches may be padded on the left.
    """

    def __init__(
        self, entry: Entry, limits: CaseLimits, axes: Mapping[str, Shape], *, pads_left: bool
    ) -> None:
        self.entry, self.limits, self.axes, self.pads_left = entry, limits, axes, pads_left

    def cases(self, all_situations: tuple[Situation, ...]) -> tuple[Case, ...]:
        """Return the cases of situations, and the base case with each input changed."""
        base = all_situations[0]
        caches = [end.layer for end in self.entry.having("past")]
        ends = [e for e in self.entry.inputs.values() if e.layer in {-1, *caches[:1], *caches[-1:]}]
        changed = [self.changed(base, end.name) for end in ends]
        return (*map(self.case, all_situations), *filter(None, changed))

    def case(self, situation: Situation) -> Case:
        """Return the case of a situation."""
        valid = situation.valid()
        return self._case(situation, self.inputs(situation, situation.name), valid)

    def changed(self, base: Situation, name: str) -> Case | None:
        """Return the base case with other values of an input; None if it has no others."""
        end, valid, inputs = self.entry.inputs[name], base.valid(), self.inputs(base, base.name)
        case = dataclasses.replace(base, name=f"{CHANGED}{name}", about=f"another {name}")
        other = self.inputs(case, case.name)
        fixed = {"branch", "window", "lengths", "" if self.pads_left else "mask"}
        if end.role in fixed or (end.role == "write at" and not self.entry.counts_past):
            return None
        if end.role == "mask":
            valid = valid.copy()
            valid[-1, : min(2, valid.shape[1] - 1)] = False
            inputs[name] = valid.astype(numpy_dtype(end.dtype))
        elif end.role == "states mask":
            inputs[name] = inputs[name].copy()
            inputs[name][-1, -2:] = 0
        elif end.role == "positions":
            inputs[name] = inputs[name] + 1
        elif end.role == "token types":
            inputs[name] = 1 - inputs[name]
        elif end.role in ("write at", "logits at"):
            inputs[name] = np.maximum(inputs[name] - 1, 0)
            inputs[name][:1] = 0
        else:
            inputs[name] = other[name]
        return self._case(case, inputs, valid)

    def own(self, name: str, about: str, given: Mapping[str, np.ndarray]) -> Case:
        """Return the case of inputs of the user's own; those that are left out follow from them.

        Pasts that are left out are empty, and all logits are wanted.
        """
        at = self.entry.one("logits at")
        if at is not None and at.name not in given:
            batch, query = next(iter(given.values())).shape[:2]
            given = {**given, at.name: np.tile(np.arange(query), (batch, 1))}
        shapes = {end: self.axes[end] for end in given}
        sizes = {PAST: 0, QUERIES: 1} | solved_sizes(given, shapes, about)
        past = sizes[PAST]
        total = past + sizes[QUERIES]
        if sizes.setdefault(TOTAL, total) != total:
            raise UsageError(
                f"--inputs {about}: a mask of {sizes[TOTAL]} for {past} past and {sizes[QUERIES]} "
                f"new tokens; give {total}"
            )
        mask = next((given[e.name] for e in self.entry.having("mask") if e.name in given), None)
        slots = np.ones((sizes[BATCH], sizes[TOTAL]), bool) if mask is None else mask != 0
        new, old = (sizes[QUERIES],) * sizes[BATCH], (past,) * sizes[BATCH]
        situation = Situation(name, about, new, old, slots=slots, sizes=sizes)
        inputs = self.inputs(situation, name)
        inputs |= {end: array for end, array in given.items() if end in inputs}
        return self._case(situation, inputs, situation.valid())

    def _case(self, situation: Situation, inputs: Arrays, valid: np.ndarray) -> Case:
        if self.entry.counts_past:
            valid = np.ones_like(valid)
        # The free slots of a cache that rolls are not compared.
        rolls = any(end.rolls for end in self.entry.having("past"))
        ignored = tuple(np.flatnonzero(~valid.all(1) | rolls).tolist())
        judged = {
            name: self._judged(end, situation, valid)
            for name, end in self.entry.outputs.items()
            if ignored and end.role != "window"
        }
        sizes = self.sizes(situation)
        named = {axis for shape in self.axes.values() for axis in shape}
        named |= {PAST} if self.entry.counts_past else set()
        return Case(
            situation.name, situation.kind, {n: s for n, s in sizes.items() if n in named}, inputs,
            situation.about, ignored_rows=ignored, judged_rows=judged,
        )  # fmt: skip

    def sizes(self, situation: Situation) -> dict[str, int]:
        """Return the sizes of the axes."""
        query, past = max(situation.new), max(situation.past)
        # Changes of the base case have its sizes.
        is_base = situation.name.startswith((BASE, CHANGED))
        number = 1 if is_base else sum(situation.name.encode())
        keys = 5 if is_base else (5, 3, 9, 1)[number % 4]
        logits = 3 if is_base else 1 + number % 3  # `verify` asks for three sizes
        return {
            BATCH: len(situation.new), QUERIES: query, PAST: past,
            CAPACITY: past + query + _SPARE[number % len(_SPARE)], TOTAL: past + query,
            KEYS: keys, ENCODED: keys, LOGIT_COUNT: min(query, logits),
            **situation.sizes,
        }  # fmt: skip

    def inputs(self, situation: Situation, seed: str) -> dict[str, np.ndarray]:
        """Return the inputs of the graph, in its order."""
        valid, past, sizes = situation.valid(), max(situation.past), self.sizes(situation)
        patterns: dict[str, Callable[[np.ndarray], Any]] = {
            "ids": lambda ids: self._ids(situation.tokens, ids, seed),
            "mask": lambda mask: valid[:, -mask.shape[1] :],
            "positions": lambda _: (valid.cumsum(1) - 1).clip(0)[:, past:],
            "states mask": self._states_mask,
            "branch": lambda branch: np.full(branch.shape, past > 0),
            "window": lambda _: self.limits.window,
            "write at": lambda _: situation.past,
            "lengths": lambda _: np.add(situation.past, situation.new),
            "logits at": lambda at: np.c_[at[:, :-1], [sizes[QUERIES] - 1] * len(at)],
        }
        described = {n: self._described(end, sizes) for n, end in self.entry.inputs.items()}
        drawn = draw_inputs(described, sizes, seed_words=seed_words(seed))
        return {
            name: np.asarray(patterns.get(end.role, np.asarray)(drawn[name])).astype(
                numpy_dtype(end.dtype)
            )
            for name, end in self.entry.inputs.items()
        }

    def _described(self, end: End, sizes: Mapping[str, int]) -> Input:
        """Return the description of the random numbers of an input, whole ones in int64."""
        shape = (sizes.get(a, 0) if isinstance(a, str) else a for a in self.axes[end.name])
        high = {"ids": self.limits.vocabulary - 1, "logits at": sizes[QUERIES] - 1}.get(end.role, 1)
        dtype = end.dtype if is_floating(numpy_dtype(end.dtype)) else "int64"
        return Input(tuple(shape), dtype, 0, high, first=None)

    def _states_mask(self, mask: np.ndarray) -> np.ndarray:
        """Return which tokens of the encoder are no padding; in graphs of ours, fewer in turn."""
        batch, keys = mask.shape
        last = keys - 1 - (np.arange(batch) if self.entry.counts_past else np.zeros(batch))
        return np.asarray(np.arange(keys) <= np.maximum(last, 0)[:, None])

    def _ids(self, tokens: str, ids: np.ndarray, seed: str) -> np.ndarray | int:
        """Return token ids: random ones, or those of a situation that is about them."""
        if tokens in ("largest", "equal"):
            at = {"largest": self.limits.vocabulary - 1, "equal": self.limits.vocabulary // 2}
            return np.full(ids.shape, at[tokens])
        if tokens != "special" and not self.limits.tying:
            return ids
        others = np.setdiff1d(np.arange(self.limits.vocabulary), self.limits.tying)
        chosen = np.array(self.limits.special) if tokens == "special" else others
        name = next(iter(self.entry.having("ids"))).name
        return generator(*seed_words(seed, name)).choice(chosen, ids.shape)

    def _judged(self, end: End, situation: Situation, valid: np.ndarray) -> tuple[int, ...]:
        """Return the rows of an output that hold tokens, counted through all axes but the last."""
        past, shape = max(situation.past), self.axes[end.name]
        padded = ~valid.all(1) | any(e.rolls for e in self.entry.having("past"))
        if end.role == "value" and not {QUERIES, ""} & {*shape[:-1]}:  # of no tokens but the last
            inner = [int(self.sizes(situation).get(str(a), a)) for a in shape[1:-1]]
            padded = padded & (valid[:, -1] | (inner != [1]))
            return tuple(np.flatnonzero(np.repeat(padded, math.prod(inner))).tolist())
        if end.of == "encoder":
            valid = np.ones((len(valid), self.sizes(situation)[KEYS]), bool)
        elif end.role != "present" or not self.entry.having("past"):
            valid = valid[:, past:]
        elif end.rolls:
            at = np.arange(int(shape[-2]))
            valid = np.broadcast_to(at < valid.shape[1], (len(valid), len(at)))
        elif self.entry.one("write at"):
            valid = self._written(shape, situation)
        rows = valid[:, None] if len(shape) == 4 else valid
        rows = np.broadcast_to(rows, (len(valid), *map(int, shape[1:-2]), valid.shape[1]))
        return tuple(np.flatnonzero(rows & padded.reshape(-1, *(1,) * (rows.ndim - 1))).tolist())

    def _written(self, shape: Shape, situation: Situation) -> np.ndarray:
        """Return the slots of a cache of fixed size that no padding was written to."""
        slots = np.arange(int(shape[-2]))
        ends = np.add(situation.past, situation.new)[:, None]
        padded = np.array(situation.past)[:, None] + max(situation.new)
        return (slots < ends) | (slots >= padded)
