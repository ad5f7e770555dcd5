"""Names of the inputs and outputs of a graph, by those of the module that it is compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from attn_export.results import CHANGED, Case, Golden

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class EndNames:
    """Names in a graph by the names of a module, or of another graph.

    Attributes:
        inputs: All inputs, in the module's order.
        outputs: All outputs, in the module's order.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    def case(self, case: Case) -> Case:
        """Return a case with the inputs as the graph names them."""
        changed = case.name.removeprefix(CHANGED)
        is_change = case.name.startswith(CHANGED) and changed in self.inputs
        return dataclasses.replace(
            case,
            name=f"{CHANGED}{self.inputs[changed]}" if is_change else case.name,
            inputs={self.inputs[name]: array for name, array in case.inputs.items()},
        )

    def golden(self, golden: Golden) -> Golden:
        """Return a case and its truth with inputs and outputs as the graph names them."""

        def renamed(values: Mapping[str, T]) -> dict[str, T]:
            return {self.outputs[name]: value for name, value in values.items()}

        return Golden(
            self.case(golden.case),
            renamed(golden.expected),
            renamed(golden.eager),
            renamed(golden.allowed),
            renamed(golden.unusable),
            renamed(golden.tied),
        )

    def note(self) -> str:
        """Return a note on the names that differ, or ""."""
        pairs = (*self.inputs.items(), *self.outputs.items())
        other = [f"{name} is {theirs}" for name, theirs in pairs if name != theirs]
        return f"in the graph, {', '.join(other)}" if other else ""
