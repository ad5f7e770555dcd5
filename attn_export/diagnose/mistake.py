"""Type of a known mistake, and changes of values that many mistakes share."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from attn_export.diagnose.attention_steps import Change
from attn_export.tensorfile import Array

if TYPE_CHECKING:
    import onnx

    from attn_export.diagnose.evaluate import Evaluation, Rounding, Values

Replaced = Callable[["Values"], Mapping[str, Array]]
"""Function that takes all values of a case, and returns those that the mistake changes, by name."""


EXACT = 0.9
"""Least share of the error that a mistake must account for."""


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A known mistake, applied at one place of a right graph.

    Either `replaced` or `rounding` is set.

    Attributes:
        kind: Its kind, in a word or two: ``"scale"``.
        says: Its effect as a clause: ``"scores are multiplied by …"``.
        node: The name of the node, graph input or initialiser; "" if it applies everywhere.
        replaced: Returns the values that it changes.
        rounding: Rounds the operands of every product.
        share: The least share of the error that it must account for. It is less for mistakes of
            rounding, which cannot be repeated bit by bit.
    """

    kind: str
    says: str
    node: str
    replaced: Replaced | None = None
    rounding: Rounding | None = None
    share: float = EXACT

    def outputs(
        self, evaluation: Evaluation, inputs: Mapping[str, Array], values: Values
    ) -> dict[str, Array]:
        """Compute the outputs of the graph with the mistake.

        Args:
            evaluation: The right graph.
            inputs: The inputs of a case, by name.
            values: The values of the right graph for these inputs.
        """
        if self.rounding is not None:
            return evaluation.outputs_of(evaluation.values(inputs, self.rounding))
        assert self.replaced is not None
        return evaluation.outputs_of(evaluation.recompute(values, self.replaced(values)))


ROUNDED = 0.3
"""Least share of the error that a mistake of rounding must account for."""


def attention_step_mistake(
    evaluation: Evaluation, node: onnx.NodeProto, kind: str, says: str, **changes: Change
) -> Mistake:
    """Make a mistake in the steps of an `Attention` node.

    Args:
        evaluation: The right graph.
        node: Its `Attention` node.
        kind: The kind of the mistake, in a word or two.
        says: Its effect as a clause.
        changes: The changed steps, by name.
    """
    share = ROUNDED if kind.endswith("precision") else EXACT
    return Mistake(
        kind,
        says,
        node.name,
        lambda values: evaluation.attention(node, values, changes),
        share=share,
    )


def change_value(name: str, change: Callable[[Array], Array]) -> Replaced:
    """Return a function that changes one value of a graph.

    Args:
        name: The name of the value.
        change: Takes the array, and returns one of the same shape.
    """

    def replaced(values: Values) -> dict[str, Array]:
        array = values[name]
        assert array is not None
        return {name: change(array)}

    return replaced


ChangedOutput = tuple[str, str, Callable[[Array], Array]]
"""The name of an input, the name of an output, and the function from the first to the second."""


def change_in_order(
    evaluation: Evaluation, changes: Iterable[ChangedOutput], values: Values,
    replacements: Mapping[str, Array] = types.MappingProxyType({}),
) -> dict[str, Array]:  # fmt: skip
    """Return values that a mistake changes, of which later ones depend on earlier ones.

    Args:
        evaluation: The right graph.
        changes: The changes, in the order of the graph.
        values: The values of the right graph.
        replacements: Values that are replaced before, by name.
    """
    changed = dict(replacements)
    for name, output, change in changes:
        current = evaluation.recompute(values, changed) if changed else values
        array = current[name]
        assert array is not None
        changed[output] = change(array)
    return changed


def shift_diagonals(visible: Array, shift: int, *, beyond: bool) -> Array | None:
    """Shift a mask that depends only on j - i by `shift` diagonals to the left.

    Args:
        visible: Whether query i sees key j, bool `[..., L, S]`.
        shift: The number of diagonals.
        beyond: Visibility of keys further ahead of the query than any key of `visible`.

    Returns:
        The shifted mask; None if the mask depends on more than j - i.
    """
    L, S = visible.shape[-2:]
    if not visible.size:
        return visible
    matrix = visible.reshape(-1, L, S)[0]
    if not (visible == matrix).all():
        return None
    by_diagonal = np.concatenate([matrix[::-1, 0], matrix[0, 1:]])  # j - i from -(L - 1) to S - 1
    diagonal = np.arange(S) - np.arange(L)[:, None] + L - 1
    if not (by_diagonal[diagonal] == matrix).all():
        return None
    shifted = diagonal - shift
    selected = by_diagonal[np.clip(shifted, 0, L + S - 2)]
    return np.broadcast_to(np.where(shifted > L + S - 2, beyond, selected), visible.shape)
