"""Rounding ties in the input of the output projection, if activations are quantised.

`near_ties` moves the inputs of a case, and its new keys and values, away from ties. The input of
the output projection cannot be moved by a small amount, since it is computed from integers. If a
value of a token is near a tie there, one element of that token's query moves by one quantisation
step, which changes all its values. This is repeated until no value is near a tie. If some remain, a
correct graph may round them either way, and the allowed error grows by the change that this makes.
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
from attn_export.cases.draw import generator
from attn_export.measures import EPS_FLOAT32, row_norms
from attn_export.results import Arrays, Case, Golden
from attn_export.rule import beyond_limit
from attn_export.schema import Allowed
from attn_export.truth import near_ties
from attn_export.truth.cache_quotients import (
    LEAST,
    RUNS,
    SAFETY,
    distance_from_tie,
    subtracting_zero_points,
)

MOST_ATTEMPTS = 32
"""The largest number of attempts to move the tokens of a case."""

LONGEST = 256
"""The largest number of queries of a case for which there is more than one attempt."""

LARGE, FEW_ATTEMPTS = 4_000_000, 4
"""The number of parameters from which on a module is large, and the number of attempts for large
modules, since each attempt runs the module."""

OTHER_TOKEN_EVERY = 4
"""Every 4th attempt moves another token than the one with a value near a tie; in the second half of
the attempts every 2nd one does."""

SHRINK_FACTOR = np.float32(1 - 2.0**-7)
"""The factor by which a channel of a past in floating point shrinks."""

MOST_ADDED = 0.25
"""The largest error that ties may add, as a share of the error of a run that does not round the
input of the output projection. With more, a graph that leaves the rounding out would pass."""

OUTPUT = "output"
"""The name of the output that the output projection computes."""


@dataclasses.dataclass(frozen=True)
class ProjectionTies:
    """Values near a tie in the input of the output projection.

    Attributes:
        integers: The integers of each tensor that the run quantises, less their zero points, in
            order.
        near: Mask of the values near a tie, `[B, L, N]`.
        token_changes: An upper bound on the L2 norm of the change of each token of the output if
            all values near a tie round the other way, `[B, L]`.
        unrounded_change: The estimated L2 norm of the change of the whole output if its projection
            has no rounded input.
    """

    integers: Sequence[Tensor]
    near: Tensor
    token_changes: Tensor
    unrounded_change: float

    @property
    def too_many(self) -> bool:
        """True if ties allow so much error that a graph without rounding would pass."""
        return float(self.token_changes.norm()) > MOST_ADDED * self.unrounded_change

    def widen_allowed_error(self, golden: Golden) -> Golden:
        """Return the case with its allowed error increased by what values near a tie can change.

        It is unusable if the error is beyond the limit, or too many values are near a tie.
        """
        allowed, expected = golden.allowed[OUTPUT], golden.expected[OUTPUT]
        if not self.near.any():
            return golden
        assert allowed is not None
        t = expected.astype(np.float64)
        largest = float(np.abs(t[np.isfinite(t)]).max(initial=0.0)) or 1.0
        errors, norms = self.token_changes.numpy() / largest, row_norms(t)
        by_row = errors / np.where(norms > 0, norms, np.inf)
        wider = Allowed(
            allowed.whole + float(np.linalg.norm(errors) / (np.linalg.norm(norms) or np.inf)),
            allowed.row + float(by_row.max()),
        )
        reason = beyond_limit(wider.whole, wider.row, expected.dtype)
        if self.too_many and not _shows_other_faults(golden.case):
            reason = "no evidence: too many values of the last projection's input lie near a tie"
        unusable = {**golden.unusable, **({OUTPUT: reason} if reason else {})}
        return dataclasses.replace(
            golden, allowed={**golden.allowed, OUTPUT: wider}, unusable=unusable,
            rows_near_ties=int(self.near.any(-1).sum()),
        )  # fmt: skip


class ProjectionTieFinder:
    """Finder of values near a tie in the input of the output projection of a module.

    `module`: A float64 copy of the module.
    """

    def __init__(
        self,
        module: Attention,
        truth: Callable[[Arrays], object],
        noisy: Callable[[Arrays, int], object],
    ) -> None:
        self._module, self._truth, self._noisy = module, truth, noisy
        self._rounding = near_ties.activation_rounding(module)
        size = sum(parameter.numel() for parameter in module.parameters())
        self._attempts = MOST_ATTEMPTS if size < LARGE else FEW_ATTEMPTS

    def with_fewest_ties(self, case: Case) -> Case | None:
        """Return the case with the fewest values near a tie of those that were tried.

        Returns:
            The case, or None if its inputs cannot be moved away from ties, or if too many values
            stay near one in every attempt.
        """
        random = generator("ties", case.name)
        best, fewest, margin = None, np.inf, None
        shows_other_faults = _shows_other_faults(case)
        short = case.inputs["query"].shape[1] <= LONGEST
        for attempt in range(self._attempts if short else 1):
            moved = near_ties.move_off_ties(case, self._module)
            if moved is None:
                break
            case, quantised = moved, self._record(moved.inputs)
            # Inputs that differ by a step of one element have about the same errors.
            margin = self._margin(moved.inputs, quantised) if margin is None else margin
            ties = self._ties(quantised, margin)
            count = int(ties.near.sum())
            if count < fewest and (shows_other_faults or not ties.too_many):
                best, fewest = case, count
            if not count:
                break
            case = self._move_tokens(case, ties.near.numpy(), random, attempt)
        return best

    def find(self, inputs: Arrays) -> ProjectionTies:
        """Return the values near a tie in a run of these inputs."""
        quantised = self._record(inputs)
        return self._ties(quantised, self._margin(inputs, quantised))

    def subtract_zero_points(self) -> AbstractContextManager[None]:
        """Let products of the copy round as kernels do that subtract zero points afterwards."""
        return subtracting_zero_points(self._module)

    def _move_tokens(
        self, case: Case, near: np.ndarray, random: np.random.Generator, attempt: int
    ) -> Case:
        """Return a case with a moved token for the first value near a tie of each batch element.

        One element of the value's token moves by one quantisation step. In some attempts it is an
        element of another token that the query may see. In the second half of the attempts the
        elements of that other token are rotated as well, and the past values that contribute to
        the value near a tie shrink, since a query may see nothing but the past.
        """
        spec = self._module.spec
        inputs = {**case.inputs, "query": case.inputs["query"].copy()}
        query = inputs["query"]
        scales = self._rounding.scales(torch.from_numpy(query))
        if spec.has_cache:
            inputs["past_value"] = case.inputs["past_value"].copy()
        for batch in np.flatnonzero(near.any(axis=(1, 2))):
            token, value = map(int, np.argwhere(near[batch])[0])
            late = attempt >= self._attempts // 2
            if attempt % (2 if late else OTHER_TOKEN_EVERY) == 1:
                token = int(random.integers(token + 1 if spec.causal else query.shape[1]))
                if late:  # in a cache of few bits a step of an input changes nothing
                    shift = random.integers(query.shape[2])
                    query[batch, token] = np.roll(query[batch, token], shift)
            near_ties.step_towards_zero(query, (int(batch), token), scales, random)
            if spec.has_cache and late:
                head, channel = divmod(value, spec.v_head_dim)
                _shrink(inputs["past_value"][batch, head // spec.q_per_kv], channel)
        return dataclasses.replace(case, inputs=inputs)

    def _record(self, inputs: Arrays) -> list[Tensor]:
        """Return the tensors that a run quantises; the output projection's input is last."""
        with record_quantised(self._module) as quantised:
            self._truth(inputs)
        return quantised

    def _margin(self, inputs: Arrays, quantised: Sequence[Tensor]) -> Tensor:
        """Return the distance in steps from a tie that rounding errors do not exceed, `[B, L, N]`.

        It is the same for all channels of a head.
        """
        exact = self._quotients(quantised[-1])
        largest = torch.zeros_like(exact)
        integers = [self._rounding.integers(x) for x in quantised]
        for number in range(RUNS):
            fixed = force_integers([*integers[:-1], None], self._module)
            with fixed, record_quantised(self._module) as noisy:
                self._noisy(inputs, number)
            largest = torch.maximum(largest, (self._quotients(noisy[-1]) - exact).abs())
        margin = SAFETY * largest + LEAST * EPS_FLOAT32 * exact.abs()
        heads = margin.unflatten(-1, (self._module.spec.num_heads, -1))
        by_head: Tensor = heads.amax(-1, keepdim=True).expand_as(heads).flatten(-2)
        return by_head

    def _ties(self, quantised: Sequence[Tensor], margin: Tensor) -> ProjectionTies:
        x = quantised[-1]  # [B, L, N]
        near = distance_from_tie(self._quotients(x)) < margin
        columns = self._module.out_proj.weight.detach().double().norm(dim=0)  # of [E, N]
        steps = (self._rounding.scales(x) * columns).expand_as(x)
        # Errors of rounding are uniform within half a step.
        size = float(steps[steps.isfinite()].norm()) / 12**0.5
        integers = [self._rounding.integers(tensor) for tensor in quantised]
        return ProjectionTies(integers, near, torch.where(near, steps, 0.0).sum(-1), size)

    def _quotients(self, x: Tensor) -> Tensor:
        """Return `x` divided by its scales, before rounding."""
        return x / self._rounding.scales(x)


@contextlib.contextmanager
def record_quantised(module: Attention) -> Iterator[list[Tensor]]:
    """Yield a list that receives the tensors that the module quantises, each `[B, L, N]`."""
    tensors: list[Tensor] = []
    activations = module.activations
    with activations.register_forward_pre_hook(lambda _, x: tensors.append(x[0].detach())):
        yield tensors


@contextlib.contextmanager
def force_integers(integers: Sequence[Tensor | None], *modules: Attention) -> Iterator[None]:
    """Replace the integers that modules round to inside this block; scales stay their own.

    `integers`: The integers of each tensor that a run quantises, in order, `[B, L, N]`; None for a
    tensor that the run rounds by itself. If runs are stacked along the batch axis, each gets the
    same integers.
    """

    def hook(module: Attention) -> RemovableHandle:
        replacements = itertools.cycle(integers)
        rounding = near_ties.activation_rounding(module)

        def replace(_: nn.Module, args: tuple[Tensor], rounded: Tensor) -> Tensor:
            whole = next(replacements)
            if whole is None:
                return rounded
            if whole.shape != rounded.shape:
                whole = whole.repeat(len(rounded) // len(whole), 1, 1)
            return whole.to(rounded.dtype) * rounding.scales(args[0])

        return module.activations.register_forward_hook(replace)

    with contextlib.ExitStack() as handles:
        for module in modules:
            handles.enter_context(hook(module))
        yield


def _shows_other_faults(case: Case) -> bool:
    """Return whether a case is evidence even if a graph without rounding would pass it."""
    return case.may_overflow or (case.kind == "probe" and not case.contents)


def _shrink(past: np.ndarray, channel: int) -> None:
    """Move a channel of a head's past values, `[P, Dv]`, a little towards 0, in place."""
    if past.dtype == np.uint8:  # [P, Dv / 2]: a byte holds two values
        byte, half = past[:, channel // 2], channel % 2
        number = (byte >> (4 * half)) & 15
        byte += (np.sign(MIDDLE - number.astype(np.int8)) * 16**half).astype(np.uint8)
    elif past.dtype == np.int8:
        past[:, channel] -= np.sign(past[:, channel])
    else:
        past[:, channel] *= SHRINK_FACTOR
