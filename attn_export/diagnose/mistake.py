"""Description of a known mistake, and the small changes that many mistakes consist of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from attn_export.diagnose.attention_steps import Change
from attn_export.tensorfile import Array

if TYPE_CHECKING:
    import onnx

    from attn_export.diagnose.evaluate import Evaluation, Rounding, Values

Replaced = Callable[["Values"], Mapping[str, Array]]
"""Gets the values of a case; gives those that the mistake changes, by name."""


EXACT = 0.9


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One way of being wrong, made in one place of a right graph.

    Attributes:
        kind: Its kind, in a word or two: ``"scale"``.
        says: Its effect, as the rest of a sentence: ``"scores are multiplied by …"``.
        node: Where: the name of a node, of an input, or of an initialiser; "" for everywhere.
        replaced: The values that it changes.
        rounding: Its rounding of the operands of every product, instead.
        share: The share of the error that it must account for. Rounding is not repeated to the bit.
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
        """Return the outputs of the graph with the mistake.

        Args:
            evaluation: The right graph.
            inputs: Of a case.
            values: The values of the graph for them without the mistake.
        """
        if self.rounding is not None:
            return evaluation.outputs_of(evaluation.values(inputs, self.rounding))
        assert self.replaced is not None
        return evaluation.outputs_of(evaluation.again(values, self.replaced(values)))


ROUNDED = 0.3
"""The share for mistakes of rounding."""


def in_attention(
    evaluation: Evaluation, node: onnx.NodeProto, kind: str, says: str, **changes: Change
) -> Mistake:
    """Return a mistake in the steps of an `Attention` node.

    Args:
        evaluation: The right graph.
        node: Its `Attention` node.
        kind: The kind of the mistake, in a word or two.
        says: Its effect, as the rest of a sentence.
        changes: The changed steps by name.
    """
    share = ROUNDED if kind.endswith("precision") else EXACT
    return Mistake(
        kind, says, node.name, lambda v: evaluation.attention(node, v, changes), share=share
    )


def becomes(name: str, of: Callable[[Array], Array]) -> Replaced:
    """Return a change of one value.

    Args:
        name: The name of the value.
        of: The change: an array to an array of the same shape.
    """

    def replaced(values: Values) -> dict[str, Array]:
        array = values[name]
        assert array is not None
        return {name: of(array)}

    return replaced


def along_diagonals(visible: Array, shift: int, *, beyond: bool) -> Array | None:
    """Shift a matrix [..., L, S] that depends on j - i alone by `shift` diagonals to the left.

    Args:
        visible: The keys j that each query i sees.
        shift: The number of diagonals.
        beyond: Whether a query sees keys that are further ahead of it than any in the matrix.

    Returns:
        None where it depends on more.
    """
    L, S = visible.shape[-2:]
    if not visible.size:
        return visible
    matrix = visible.reshape(-1, L, S)[0]
    if not (visible == matrix).all():
        return None
    of_diagonal = np.concatenate([matrix[::-1, 0], matrix[0, 1:]])  # j - i from -(L - 1) to S - 1
    diagonal = np.arange(S) - np.arange(L)[:, None] + L - 1
    if not (of_diagonal[diagonal] == matrix).all():
        return None
    moved = diagonal - shift
    found = of_diagonal[np.clip(moved, 0, L + S - 2)]
    return np.broadcast_to(np.where(moved > L + S - 2, beyond, found), visible.shape)
