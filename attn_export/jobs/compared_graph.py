"""The graph that a comparison judges: its file, its form, and its names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.errors import GraphError, UsageError, printable
from attn_export.results import GraphFile
from attn_export.runtimes.limited import limited
from attn_export.runtimes.protocol import Limits

if TYPE_CHECKING:
    import onnx

    from attn_export.graph.end_names import EndNames
    from attn_export.jobs.reference import Reference


@dataclasses.dataclass(frozen=True)
class ComparedGraph:
    """The graph that is judged.

    Attributes:
        path: Its file.
        model: Its content, without external data.
        file: How it is run.
        names: Its names of inputs and outputs.
    """

    path: Path
    model: onnx.ModelProto
    file: GraphFile
    names: EndNames | None = None

    @classmethod
    def read(cls, path: Path, limits: Limits) -> ComparedGraph:
        """Read a graph.

        Args:
            path: The file.
            limits: The limits of the process that reads it.

        Raises:
            GraphError: If it cannot be read.
        """
        from attn_export.graph.load import load_proto, refuse_bad_data
        from attn_export.graph.requirements import dialect_of

        if not path.is_file():
            raise GraphError(f"cannot read {path}: no such file")
        model = load_proto(path)
        refuse_bad_data(model, path)
        module = "attn_export.graph.requirements:foreign_features"
        found = tuple(limited(module, str(path), limits, path=str(path)))
        return cls(path, model, GraphFile(path.name, dialect_of(found), features=found))

    def matched_to(self, reference: Reference, names: Mapping[str, str]) -> ComparedGraph:
        """Return the graph with its names, and the axes that have one size in it.

        Args:
            reference: The module or graph that it is compared with.
            names: Its names by those of the reference, as the user gave them.

        Raises:
            UsageError: If `names` names what is not there.
            GraphError: If its inputs or outputs are not those of the reference.
        """
        from attn_export.graph.end_names import EndNames
        from attn_export.graph.signature_check import End, form_of_file, inputs_of, matched_names

        inputs = [value.name for value in inputs_of(self.model)]
        outputs = [value.name for value in self.model.graph.output]
        _check_names(self.path, names, reference, {*inputs, *outputs})
        shown, whose = str(self.path), reference.whose
        found = EndNames(
            matched_names(shown, "inputs", inputs, list(reference.inputs), names, whose),
            matched_names(shown, "outputs", outputs, list(reference.outputs), names, whose),
        )
        wanted_inputs = {
            found.inputs[n]: End(wanted.shape, wanted.dtype)
            for n, wanted in reference.inputs.items()
        }
        wanted_outputs = {
            found.outputs[n]: End(shape, reference.dtypes[n])
            for n, shape in reference.outputs.items()
        }
        file = form_of_file(
            self.model, shown, self.file, wanted_inputs, wanted_outputs, reference.whose
        )
        return dataclasses.replace(self, file=file, names=found)


def _check_names(
    path: Path, names: Mapping[str, str], reference: Reference, theirs: set[str]
) -> None:
    ours = {*reference.inputs, *reference.outputs}
    for name, other in names.items():
        if name not in ours or other not in theirs:
            where, unknown, known = (
                (reference.whose, name, ours) if name not in ours else (path, other, theirs)
            )
            raise UsageError(
                f"names: {where} has no input or output {printable(unknown, 60)}; choose from "
                f"{printable(', '.join(sorted(known)), 150)}"
            )
