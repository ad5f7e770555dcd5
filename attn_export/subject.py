"""`Subject`: a module with named inputs, named dynamic axes and named outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import Self

import torch
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.cases.draw import draw_inputs
from attn_export.cases.plan import Plan, plan_cases
from attn_export.cases.sizes import TRACED_SIZES, axis_names, with_sums
from attn_export.errors import ExportError, UsageError, one_line
from attn_export.graph.checks import Expected
from attn_export.spec import AttentionSpec, Shape


class Subject:
    """What is exported and compared: ours from a spec, or any module of the user's.

    Args:
        module: In eval mode. Called with the inputs by name.
        inputs: Example inputs by the names of `module.forward`'s parameters. Axes that are
            dynamic need example sizes of 2 or more.
        axes: For each input its dynamic axes: ``{"query": {0: "batch", 1: "query_len"}}``.
            Axes of one name have one size.
        outputs: Names for the tensors that the module returns, in order.
        relations: Axes that others add up to: ``{"total_len": "past_len + query_len"}``.
        spec: The spec behind the module, if it is ours.

    Raises:
        UsageError: If names or axes do not fit together.
        ExportError: If a part of the module is in train mode.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Mapping[str, Tensor],
        axes: Mapping[str, Mapping[int, str]],
        outputs: Sequence[str],
        *,
        relations: Mapping[str, str] | None = None,
        spec: AttentionSpec | None = None,
    ) -> None:
        self.module = module
        self.inputs = dict(inputs)
        self.axes = {name: dict(axes.get(name, {})) for name in inputs}
        self.outputs = tuple(outputs)
        self.relations = dict(relations or {})
        self.spec = spec
        self._check_names(axes)
        self._check_axes()
        _refuse_train_mode(module)

    @classmethod
    def from_spec(cls, spec: AttentionSpec, *, seed: int = 0) -> Self:
        """The `Attention` of a spec, with seeded weights.

        The global random state is left as it was.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = Attention(spec).eval()
            _make_norms_matter(module)
        shapes = spec.input_shapes()
        example = draw_inputs(shapes, _spec_dtypes(spec), TRACED_SIZES, seed_words=("example",))
        return cls(
            module,
            {name: torch.from_numpy(array) for name, array in example.items()},
            {name: _named_axes(shape) for name, shape in shapes.items()},
            list(spec.output_shapes()),
            relations=spec.relations,
            spec=spec,
        )

    def input_shapes(self) -> dict[str, Shape]:
        """The shape of every input; dynamic axes by name."""
        return {
            name: tuple(self.axes[name].get(axis, size) for axis, size in enumerate(tensor.shape))
            for name, tensor in self.inputs.items()
        }

    def input_dtypes(self) -> dict[str, str]:
        """The numpy dtype of every input."""
        return {name: str(t.dtype).removeprefix("torch.") for name, t in self.inputs.items()}

    def output_shapes(self) -> dict[str, Shape]:
        """The shape of every output; dynamic axes by name.

        For a module of the user's they are found by running it twice, at the example's sizes
        and at others: an axis is the one whose size it has both times.
        """
        if self.spec is not None:
            return self.spec.output_shapes()
        return infer_output_shapes(self)

    def plan(self) -> Plan:
        """The cases that it is tried with."""
        return plan_cases(
            self.input_shapes(),
            self.input_dtypes(),
            self.output_shapes(),
            self.spec,
            self.relations,
        )

    def expected(self) -> Expected:
        """What its graph has to look like."""
        return Expected(
            inputs=self.input_shapes(),
            outputs=self.output_shapes(),
            attentions=1 if self.spec is not None else None,
            ours=self.spec is not None,
        )

    def call(self, module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run `module`, a copy of this subject's own, and name its outputs.

        Raises:
            UsageError: If it returns something else than the tensors that `outputs` names.
            ExportError: If it raises; names the sizes.
        """
        try:
            returned = module(**inputs)
        except Exception as error:
            at = ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in inputs.items())
            raise ExportError(f"the module raised at {at}: {one_line(error)}") from error
        tensors = [returned] if isinstance(returned, Tensor) else returned
        if not isinstance(tensors, (list, tuple)) or not all(
            isinstance(tensor, Tensor) for tensor in tensors
        ):
            raise UsageError(
                f"the module returns {type(returned).__name__}; it has to return a tensor, or a "
                "tuple or list of tensors"
            )
        if len(tensors) != len(self.outputs):
            raise UsageError(
                f"the module returns {len(tensors)} tensors, but outputs names "
                f"{len(self.outputs)}: {', '.join(self.outputs)}"
            )
        return dict(zip(self.outputs, tensors, strict=True))

    def _check_names(self, axes: Mapping[str, Mapping[int, str]]) -> None:
        try:
            signature(self.module.forward).bind(**self.inputs)
        except TypeError as error:
            raise UsageError(
                f"the inputs {', '.join(self.inputs)} do not fit {type(self.module).__name__}"
                f".forward{signature(self.module.forward)}: {error}"
            ) from error
        for name, tensor in self.inputs.items():
            if tensor.dtype not in (torch.float32, torch.bool):
                raise UsageError(f"{name} is {tensor.dtype}; inputs are float32 or bool")
        for name in axes:
            if name not in self.inputs:
                known = ", ".join(self.inputs)
                raise UsageError(f"axes names the input {name!r}, which is not one of: {known}")

    def _check_axes(self) -> None:
        sizes: dict[str, tuple[int, str]] = {}
        for name, axis, label in self._dynamic_axes():
            shape, here = self.inputs[name].shape, f"{name}.shape[{axis}]"
            if not 0 <= axis < len(shape):
                raise UsageError(f"{name} has {len(shape)} axes, so axis {axis} cannot be named")
            size, there = sizes.setdefault(label, (shape[axis], here))
            if size != shape[axis]:
                raise UsageError(
                    f"axis {label!r} is {size} in {there} and {shape[axis]} in {here}; give both "
                    "one size or two names"
                )
            if size < 2:
                raise UsageError(
                    f"axis {label!r} ({here}) has size {size} in the example, which the exporter "
                    "would fix; give an example of 2 or more"
                )

    def _dynamic_axes(self) -> Iterator[tuple[str, int, str]]:
        for name, dynamic in self.axes.items():
            for axis, label in dynamic.items():
                yield name, axis, label


def _make_norms_matter(module: nn.Module) -> None:
    """Give normalisations weights that show: those of 1 and 0 hide that they were left out."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, (nn.RMSNorm, nn.LayerNorm)):
                part.weight.normal_(1.0, 0.3)
                if isinstance(part, nn.LayerNorm):
                    part.bias.normal_(0.0, 0.3)


def _spec_dtypes(spec: AttentionSpec) -> dict[str, str]:
    mask = "bool" if spec.mask and spec.mask.dtype == "bool" else spec.dtype
    return {name: mask if name == "attn_mask" else spec.dtype for name in spec.input_shapes()}


def infer_output_shapes(subject: Subject) -> dict[str, Shape]:
    """Name the axes of a module's outputs by running it at two sets of sizes.

    Raises:
        UsageError: If the module does not take the sizes that its axes allow.
    """
    # Each axis has a size of its own that ends alike, so that a sum of two is no third.
    names = axis_names(subject.input_shapes(), subject.relations)
    free = [name for name in names if name not in subject.relations]
    found: list[dict[str, tuple[int, ...]]] = []
    rounds: list[dict[str, int]] = []
    for base in (2, 3):
        sizes = {name: base * 2 + 1 + 5 * index * base for index, name in enumerate(free)}
        sizes = with_sums(sizes, subject.relations)
        rounds.append(sizes)
        arrays = draw_inputs(
            subject.input_shapes(), subject.input_dtypes(), sizes, seed_words=("shapes",)
        )
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        with torch.inference_mode():
            outputs = subject.call(subject.module, tensors)
        found.append({name: tuple(tensor.shape) for name, tensor in outputs.items()})
    by_sizes = {(rounds[0][name], rounds[1][name]): name for name in rounds[0]}
    return {
        name: tuple(
            first if first == second else by_sizes.get((first, second), "")
            for first, second in zip(shape, found[1][name], strict=True)
        )
        for name, shape in found[0].items()
    }


def _named_axes(shape: Shape) -> dict[int, str]:
    return {axis: size for axis, size in enumerate(shape) if isinstance(size, str)}


def _refuse_train_mode(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if part.training:
            where = f"{name} ({type(part).__name__})" if name else type(part).__name__
            raise ExportError(
                f"{where} is in train mode, where dropout and the like change its outputs; "
                "call .eval() on the module first"
            )
