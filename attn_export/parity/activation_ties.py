"""Cases whose quantised activations are certain, and the error that the other ones may have.

Rounding to an integer is a step, as `near_ties` says of caches. The inputs of a case are moved away
from ties. The input of the output projection is computed, from integers: nothing moves it by
little. Of a token that has a value near a tie there, an element is moved by one step of its scale,
which changes all, until no value is near one. Where that does not end, a right graph may take
either integer, and the error allowed is larger by what that changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attn_export.attention import Attention
from attn_export.attention.quantised_cache import MIDDLE
from attn_export.parity import near_ties
from attn_export.parity.cache_quotients import LEAST, RUNS, SAFETY, SINGLE, distance
from attn_export.parity.draw import generator
from attn_export.parity.measures import beyond_limit, row_norms
from attn_export.parity.zero_points import subtracting_zero_points
from attn_export.results import Allowed, Arrays, Case, Golden

DRAWS = 32
"""The largest number of draws of tokens."""

LONGEST, LARGE, FEW = 256, 4_000_000, 4
"""The most queries of a row that are moved, and the parameters of modules of which few draws are
made: each takes a run."""

BEFORE = 4
"""Every so many draws another token than the one with a value near a tie is moved."""

SMALLER = np.float32(1 - 2.0**-7)
"""The factor on a channel of the past."""

SHARE = 0.25
"""The largest error that ties may add, as a share of that of inputs that are not rounded at all:
with more, a graph that leaves the rounding out would pass."""

OUTPUT = "output"


@dataclasses.dataclass(frozen=True)
class Ties:
    """Values near a tie in the input of the output projection.

    Attributes:
        integers: Of all that the run quantises, less their zero points, in order.
        near: Where values are near a tie, `[B, L, N]`.
        rows: The largest change of each row of the output if all of them round the other way,
            as an L2 norm, `[B, L]`.
        unrounded: The L2 norm of the change of the whole output if no value is rounded.
    """

    integers: Sequence[Tensor]
    near: Tensor
    rows: Tensor
    unrounded: float

    @property
    def too_many(self) -> bool:
        """Return whether the case is no evidence that values are rounded."""
        return float(self.rows.norm()) > SHARE * self.unrounded


class ActivationTies:
    """Finder of values near a tie in the runs of a float64 copy of a module.

    Args:
        module: The copy.
        truth: Runs it on inputs.
        noisy: Runs it so that it rounds at random, by the number of the run.
    """

    def __init__(
        self,
        module: Attention,
        truth: Callable[[Arrays], object],
        noisy: Callable[[Arrays, int], object],
    ) -> None:
        self._module, self._truth, self._noisy = module, truth, noisy
        self._rounding = near_ties.rounding_in(module)
        size = sum(parameter.numel() for parameter in module.parameters())
        self._draws = DRAWS if size < LARGE else FEW

    def settled(self, case: Case) -> Case | None:
        """Return a case without values near a tie, or with as few as were found.

        Args:
            case: The case; what is quantised of its inputs may change.

        Returns:
            None where the inputs cannot be moved away from ties, or too many values stay near one.
        """
        random = generator("ties", case.name)
        found, least, margin = None, np.inf, None
        whole = _is_compared_anyway(case)
        for number in range(self._draws if case.inputs["query"].shape[1] <= LONGEST else 1):
            moved = near_ties.away_from_ties(case, self._module)
            if moved is None:
                break
            case, seen = moved, self._seen(moved.inputs)
            # Inputs that differ by a step of one element have about the same errors.
            margin = self._margin(moved.inputs, seen) if margin is None else margin
            ties = self._ties(seen, margin)
            count = int(ties.near.sum())
            if count < least and (whole or not ties.too_many):
                found, least = case, count
            if not count:
                break
            case = self._drawn_anew(case, ties.near.numpy(), random, number)
        return found

    def of(self, inputs: Arrays) -> Ties:
        """Return the values near a tie in a run of these inputs."""
        seen = self._seen(inputs)
        return self._ties(seen, self._margin(inputs, seen))

    def subtracting(self) -> AbstractContextManager[None]:
        """Let products of the copy round as kernels do that subtract zero points afterwards."""
        return subtracting_zero_points(self._module)

    def _drawn_anew(
        self, case: Case, near: np.ndarray, random: np.random.Generator, number: int
    ) -> Case:
        """Return a case that differs a little for the first value near a tie of each row.

        An element of its token, or now and then of another that it may see, moves by a step. Later
        all elements of that other token change places, and the values of the past that this value
        comes from move, since a query may see nothing else.

        Args:
            case: The case.
            near: Where values are near a tie, `[B, L, N]`.
            random: Chooses the elements.
            number: The number of draws before.
        """
        spec = self._module.spec
        inputs = {**case.inputs, "query": case.inputs["query"].copy()}
        query = inputs["query"]
        scales = self._rounding.scales(torch.from_numpy(query))
        if spec.has_cache:
            inputs["past_value"] = case.inputs["past_value"].copy()
        for row in np.flatnonzero(near.any(axis=(1, 2))):
            token, value = map(int, np.argwhere(near[row])[0])
            late = number >= self._draws // 2
            if number % (2 if late else BEFORE) == 1:
                token = int(random.integers(token + 1 if spec.causal else query.shape[1]))
                if late:  # in a cache of few bits a step of an input changes nothing
                    query[row, token] = np.roll(query[row, token], random.integers(query.shape[2]))
            near_ties.one_step_less(query, (int(row), token), scales, random)
            if spec.has_cache and late:
                head, channel = divmod(value, spec.v_head_dim)
                _shrink(inputs["past_value"][row, head // spec.q_per_kv], channel)
        return dataclasses.replace(case, inputs=inputs)

    def _seen(self, inputs: Arrays) -> list[Tensor]:
        """Return what a run quantises: its inputs, and the input of the output projection."""
        with observed(self._module) as seen:
            self._truth(inputs)
        return seen

    def _margin(self, inputs: Arrays, seen: Sequence[Tensor]) -> Tensor:
        """Return the distance from a tie, in steps, that is enough: `[B, L, N]`."""
        exact = self._quotients(seen[-1])
        largest = torch.zeros_like(exact)
        integers = [self._rounding.integers(each) for each in seen]
        for number in range(RUNS):
            with rounding_to([*integers[:-1], None], self._module), observed(self._module) as again:
                self._noisy(inputs, number)
            largest = torch.maximum(largest, (self._quotients(again[-1]) - exact).abs())
        margin = SAFETY * largest + LEAST * SINGLE * exact.abs()
        heads = margin.unflatten(-1, (self._module.spec.num_heads, -1))
        found: Tensor = heads.amax(-1, keepdim=True).expand_as(heads).flatten(-2)
        return found

    def _ties(self, seen: Sequence[Tensor], margin: Tensor) -> Ties:
        x = seen[-1]  # [B, L, N]
        near = distance(self._quotients(x)) < margin
        columns = self._module.out_proj.weight.detach().double().norm(dim=0)  # of [E, N]
        steps = (self._rounding.scales(x) * columns).expand_as(x)
        # Errors of rounding are uniform within half a step.
        size = float(steps[steps.isfinite()].norm()) / 12**0.5
        integers = [self._rounding.integers(each) for each in seen]
        return Ties(integers, near, torch.where(near, steps, 0.0).sum(-1), size)

    def _quotients(self, x: Tensor) -> Tensor:
        """Return the numbers that are rounded, of the shape of `x`."""
        return x / self._rounding.scales(x)


@contextlib.contextmanager
def observed(module: Attention) -> Iterator[list[Tensor]]:
    """Give a list of what the module quantises inside this block, in order."""
    seen: list[Tensor] = []
    hook = module.activations.register_forward_pre_hook(lambda _, x: seen.append(x[0].detach()))
    try:
        yield seen
    finally:
        hook.remove()


@contextlib.contextmanager
def rounding_to(integers: Sequence[Tensor | None], *modules: Attention) -> Iterator[None]:
    """Let runs of modules round to these integers inside this block, with their own scales.

    Args:
        integers: Of what a run quantises, in order; None for what it rounds by itself.
        modules: Changed for the time of the block.
    """

    def hook(module: Attention) -> RemovableHandle:
        again, rounding = itertools.cycle(integers), near_ties.rounding_in(module)

        def replace(_: nn.Module, given: tuple[Tensor], own: Tensor) -> Tensor:
            whole = next(again)
            return own if whole is None else whole.to(own.dtype) * rounding.scales(given[0])

        return module.activations.register_forward_hook(replace)

    hooks = [hook(module) for module in modules]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def widened(golden: Golden, ties: Ties) -> Golden:
    """Return a case whose output may have the error that values near a tie explain.

    Args:
        golden: The case.
        ties: The values, at least one.
    """
    allowed, expected = golden.allowed[OUTPUT], golden.expected[OUTPUT]
    assert allowed is not None
    t = expected.astype(np.float64)
    largest = float(np.abs(t[np.isfinite(t)]).max(initial=0.0)) or 1.0
    shares, norms = ties.rows.numpy() / largest, row_norms(t)
    by_row = shares / np.where(norms > 0, norms, np.inf)
    found = Allowed(
        allowed.whole + float(np.linalg.norm(shares) / (np.linalg.norm(norms) or np.inf)),
        allowed.row + float(by_row.max()),
    )
    reason = beyond_limit(found.whole, found.row, expected.dtype)
    if ties.too_many and not _is_compared_anyway(golden.case):
        reason = "no evidence: too many values of the last projection's input lie near a tie"
    unusable = {**golden.unusable, **({OUTPUT: reason} if reason else {})}
    return dataclasses.replace(
        golden, allowed={**golden.allowed, OUTPUT: found}, unusable=unusable,
        rows_near_ties=int(ties.near.any(-1).sum()),
    )  # fmt: skip


def _is_compared_anyway(case: Case) -> bool:
    """Return whether a case shows other faults than rounding that is left out."""
    return case.is_loud or (case.kind == "probe" and not case.contents)


def _shrink(past: np.ndarray, channel: int) -> None:
    """Move a channel of the past towards 0 a little, in place.

    Args:
        past: The values of a head, `[P, Dv]`, or `[P, Dv / 2]` if a byte holds two.
        channel: The channel.
    """
    if past.dtype == np.uint8:
        byte, half = past[:, channel // 2], channel % 2
        number = (byte >> (4 * half)) & 15
        byte += (np.sign(MIDDLE - number.astype(np.int8)) * 16**half).astype(np.uint8)
    elif past.dtype == np.int8:
        past[:, channel] -= np.sign(past[:, channel])
    else:
        past[:, channel] *= SMALLER
