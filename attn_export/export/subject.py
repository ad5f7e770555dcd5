"""A module with named inputs, named dynamic axes and named outputs: a user's, or our layer."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.export import Dim

from attn_export.attention import Attention, seeded_attention
from attn_export.attention.positions import NARROW
from attn_export.bundle.manifest import SPEC
from attn_export.cases.draw import TRACED_SIZES, Interface, add_sums, bounds, draw_inputs, may_try
from attn_export.cases.plan import Plan, plan_cases
from attn_export.errors import ExportError
from attn_export.export import subject_checks
from attn_export.export.module_state import copy_module, weights_of_graph
from attn_export.export.nested import InputTree, Results
from attn_export.export.operators import Operators, Translations
from attn_export.export.trees import (
    Axis,
    infer_output_shapes,
    named_axes,
    read_axes,
    state_of,
    to_torch,
    with_spares,
)
from attn_export.graph.check_structure import Expected
from attn_export.interface import Input, Roles, Shape, Traits
from attn_export.optional_parts import ModelKeywords, model_hook
from attn_export.schema import CACHES
from attn_export.spec import AttentionSpec

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from attn_export.cases.draw import Sizes
    from attn_export.export.input_function import InputFunction
    from attn_export.export.quantised_linears import QuantisedLinears
    from attn_export.export.unread_weights import UnreadWeights
    from attn_export.quality import Budget


@dataclasses.dataclass(frozen=True, init=False, eq=False)
class Subject:
    """Module to export and compare: any module of the user; `from_spec` gives a layer of ours.

    It does not change; `having` returns one that differs.

    Args:
        module: The module, in eval mode. It is called with the inputs by name.
        inputs: Example inputs by the names of `module.forward`'s parameters: tensors, tuples,
            lists and dicts of them, and constants. Dynamic axes have example sizes of at least 2.
            Integers of cases lie between the least and the largest of the example, or are a mask of
            0 and 1 if it is all ones. Rows of a bool input start as in the example, so that no mask
            hides everything. A float input has -inf if the example has. Or a function
            ``inputs(sizes, rng)`` that draws them: `sizes` by the names of axes, `rng` a
            `numpy.random.Generator`. Its integers and masks are not changed.
        axes: The dynamic axes of each input: ``{"query": {0: "batch", 1: "query_len"}}``.
            Axes of one name have one size; ``Axis("query_len", min=2, max=64)`` and
            `torch.export.Dim` give it bounds. ``cache.0.1`` is ``cache[0][1]``.
        outputs: Names for the tensors that the module returns, in order; for a dict, its keys.
        relations: Axes that are sums of products of others: ``{"rows": "2*query_len - 1"}``.
        notes: Notes on the module for the reader of the report.
        translations: Functions in place of custom operators: ``{"theirs::attend": function}``.

    Attributes:
        traits: What is known of how the module computes.
        sums: The relations, and further sums that drawing inputs requires (`spec.sums`).
        bounds: The sizes of axes that have bounds; `with_least` are those with a stated least.
        example_sizes: The sizes of the example, including those of `sums` and of their terms.
        encoder: The subject of the encoder, if this is the decoder of an encoder-decoder.
        oracle: Returns the oracle, from the least eps of the dtypes in the graphs, if
            the module is not the source.
        files: Files of the bundle, by name.

    Raises:
        UsageError: If names or axes do not match each other or the module.
        ExportError: If a submodule is in train mode, or the module keeps state between calls.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    axes: Mapping[str, Mapping[int, str]]
    relations: Mapping[str, str]
    notes: tuple[str, ...]
    traits: Traits
    sums: Mapping[str, str]
    bounds: Mapping[str, range]
    with_least: Collection[str]
    example_sizes: Mapping[str, int]
    tree: InputTree
    results: Results
    operators: Operators
    function: InputFunction | None
    files: Mapping[str, bytes]
    oracle: Callable[[float], Any] | None = None
    rewrite: Callable[[Any], Sequence[str] | None] | None = None  # the graph; may return notes
    has_narrow_caches: bool = False  # beside a model in float32
    restores_state: bool = True  # whether a run leaves the attributes of the module as they were
    maps_weights: bool = False  # whether the module may read them from the bundle's file
    unread: UnreadWeights | None = None  # those that the module holds only while they are needed
    stored_dtype: str = ""  # the narrower type of unread weights in the graph
    encoder: Subject | None = None
    rounds_inputs: bool = False  # whether products with integers do, in graphs of the dialect `ort`
    linears: QuantisedLinears | None = None  # if their weights are integers
    budget: Budget | None = None  # the limit of the distance from the float model, if there is one
    kept: Mapping[str, str] | None = None  # the types of weights unlike the others, by path
    fit: Callable[..., Subject] | None = None  # the same with weights by which budgets hold
    in_float32: Callable[[], Subject] | None = None  # the same, with its weights widened

    def __init__(
        self,
        module: nn.Module,
        inputs: Mapping[str, Any] | InputFunction,
        axes: Mapping[str, Mapping[int, str | Axis | Dim]],
        outputs: Sequence[str],
        *,
        relations: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
        translations: Translations | None = None,
    ) -> None:
        from attn_export.export.call_results import find_results
        from attn_export.export.kept_state import refuse_kept_state, unused_copy

        sums, function = with_spares(relations or {}), inputs if callable(inputs) else None
        self._settle(operators=Operators(translations))
        if callable(inputs):
            from attn_export.export.input_function import draw_example

            inputs = draw_example(inputs, axes, sums)
        tree, results = InputTree.flatten(inputs), Results(tuple(outputs))
        subject_checks.check_call(module, inputs, outputs)
        named, bounds, with_least = read_axes(axes, relations)
        run, fresh = functools.partial(self._run, module), unused_copy(module)
        with contextlib.suppress(Exception), torch.inference_mode():  # `call` raises it again
            tree, results = find_results(run, tree, tuple(outputs))
        names, tensors = tuple(results.places or outputs), dict(tree.tensors)
        named = tree.by_name(named)
        sizes = subject_checks.check_arguments(
            module, tensors, names, named, relations or {}, bounds
        )
        of_inputs = {name: dict(named.get(name, {})) for name in tensors}
        tree = tree.counting(results.numbers, of_inputs)
        self._settle(
            module=module, inputs=tensors, outputs=names, axes=of_inputs, relations=sums, sums=sums,
            notes=(*notes, *results.notes(tree)), traits=Traits(), bounds=bounds,
            with_least=with_least, example_sizes=add_sums(sizes, sums), tree=tree, results=results,
            function=function, files={},
        )  # fmt: skip
        if not function:  # which defines the values of integers
            subject_checks.check_integers(tensors)
        self._settle(notes=(*self.notes, *refuse_kept_state(self, fresh)))

    def _settle(self, **fields: Any) -> None:
        """Set fields while the subject is made."""
        vars(self).update(fields)

    def having(self, **fields: Any) -> Self:
        """Return a copy with other values of these fields; roles of other axes are found anew."""
        changed = copy.copy(self)
        if "axes" in fields:
            vars(changed).pop("roles", None)
        changed._settle(**fields)
        return changed

    @staticmethod
    def from_spec(spec: AttentionSpec, *, seed: int = 0) -> Layer:
        """Return the `Attention` of a spec, with seeded weights.

        Args:
            spec: The spec.
            seed: The seed of the weights. The global random state does not change.
        """
        subject = Layer(seeded_attention(spec, seed))
        dtype = spec.weights_dtype
        return subject if dtype == "none" else subject.with_weights(dtype)

    @staticmethod
    def from_config(path: Path | str, *, layer: int = 0, seed: int = 0, **fields: Any) -> Layer:
        """Return an attention as a config.json describes it, with seeded weights.

        Args:
            path: The config.json of a checkpoint, or its folder.
            layer: The number of the layer, from 0.
            seed: The seed of the weights.
            fields: Fields of the spec to change. `causal` and `cross` choose among several.

        Raises:
            WeightsError: If the file is broken, or of models that a spec cannot express.
        """
        from attn_export.weights.from_config import spec_of_config  # few builds read one

        return Subject.from_spec(spec_of_config(Path(path), layer, fields), seed=seed)

    @staticmethod
    def from_layer(
        module: Attention | nn.MultiheadAttention, *, kv_heads: int | None = None
    ) -> Layer:
        """Return an `Attention` with its own weights, or PyTorch's, which becomes one.

        Args:
            module: The layer, in eval mode.
            kv_heads: The number of key/value heads that those of the layer are mean-pooled to.
        """
        from attn_export.attention.pooling import pool_kv_heads

        layer = module if isinstance(module, Attention) else Attention.from_torch(module)
        before = layer.spec.num_kv_heads
        if kv_heads in (None, before):
            return Layer(layer)
        note = f"K/V heads were pooled from {before} to {kv_heads} by their means"
        return Layer(pool_kv_heads(layer, kv_heads), notes=(note,))

    def with_weights(self, dtype: str) -> Self:
        """Return a copy whose linear layers have weights of integers, int8 or int4."""
        from attn_export.export.quantised_linears import with_integers

        changed: Self = with_integers(self, dtype)
        return changed

    @staticmethod
    def from_model(model: Path | str | nn.Module, **options: Unpack[ModelKeywords]) -> Subject:
        """Return a model of transformers, judged as it runs there; a decoder has caches in place.

        Args:
            model: The folder of a checkpoint, or a model of transformers.
            **options: Those of `build --model`: `all_logits=True`, `max_len=512` and so on.

        Raises:
            WeightsError: If the checkpoint is broken, or asks for code.
            ExportError: If it has attention of its own, or inputs of unknown sizes.
        """
        subject: Subject = model_hook("subject_of_model")(model, **options)
        return subject

    @staticmethod
    def from_graph(spec: AttentionSpec, path: Path) -> Layer:
        """Return the `Attention` of a spec, with the weights of a graph that was exported from it.

        Args:
            spec: The spec.
            path: The graph in the dialect `standard`.

        Raises:
            GraphError: If the graph cannot be read.
            BundleError: If the graph lacks a weight, or has one of another shape or dtype.
        """
        module = seeded_attention(spec)
        module.load_state_dict(weights_of_graph(path, module))
        return Layer(module)

    @functools.cached_property
    def roles(self) -> Roles:
        """What the axes of the inputs do, found by runs of the module."""
        return subject_checks.find_roles_of(self)

    def input_descriptions(self) -> dict[str, Input]:
        """Return the description of every input, by name."""
        inputs = {n: subject_checks.input_like(x, self.axes[n]) for n, x in self.inputs.items()}
        if self.function is None:
            return inputs
        from attn_export.export.input_function import inputs_of_function

        return inputs_of_function(self.function, inputs, self.tree, self.axes)

    def sizes_with(self, changed: Sizes) -> dict[str, int]:
        """Return the example's sizes with some changed, and sums computed again."""
        return add_sums({**self.example_sizes, **changed}, self.sums)

    def draw(self, sizes: Sizes, *seed_words: str | int) -> dict[str, Tensor]:
        """Return random inputs of these sizes; the same seed words give the same inputs."""
        return to_torch(draw_inputs(self.input_descriptions(), sizes, seed_words=seed_words))

    def output_shapes(self) -> dict[str, Shape]:
        """Return the shape of every output; dynamic axes by name, which runs show."""

        @torch.inference_mode()
        def shapes_at(sizes: Sizes) -> dict[str, tuple[int, ...]]:
            outputs = self.call(self.module, self.draw(sizes, "shapes")).items()
            return {name: tuple(tensor.shape) for name, tensor in outputs}

        return infer_output_shapes(shapes_at, self.example_sizes, self.relations, self.bounds)

    def narrow_dtypes(self) -> dict[str, str]:
        """Return weights, inputs and outputs in float16 or bfloat16 by name, with their types."""
        if self.has_narrow_caches:
            return {}  # a float16 cache of a float32 model does not count
        state = state_of(self.module)
        if not any(t.dtype in NARROW for t in (*state.values(), *self.inputs.values())):
            return {}
        with self.alike(), torch.inference_mode():
            state |= self.call(self.module, self.inputs) | self.inputs
        return {name: subject_checks.dtype_of(t) for name, t in state.items() if t.dtype in NARROW}

    def alike(self) -> AbstractContextManager[None]:
        """Return a context in which weights that are in files may be others, to save time."""
        return self.unread.alike() if self.unread else contextlib.nullcontext()

    def interface(self) -> Interface:
        """Return what cases are planned from."""
        ends = self.input_descriptions(), self.output_shapes()
        return Interface(*ends, self.traits, self.sums, self.bounds, self.roles)

    def plan(self, interface: Interface | None = None) -> Plan:
        """Return the test cases of the subject, by default for its own interface."""
        return plan_cases(interface or self.interface(), self.takes, self.weights())

    def weights(self) -> int:
        """Return the number of weights of the module."""
        return sum(weight.numel() for weight in self.module.parameters())

    def takes(self, sizes: Sizes) -> bool:
        """Return whether the module runs at these sizes; False if to try it takes long."""
        is_quick = may_try(self.weights(), self.sizes_with(sizes), self.sums)
        return is_quick and self.runs_with(sizes, "sizes")

    def runs_with(self, changed: Sizes, seed: str) -> bool:
        """Return whether the module runs on random inputs of sizes that need little memory."""
        from attn_export.export.loops import short_loops

        with contextlib.suppress(ExportError), torch.inference_mode(), short_loops():
            is_small = may_try(0, sizes := self.sizes_with(changed), self.sums)
            return is_small and bool(self.call(self.module, self.draw(sizes, seed)))
        return False

    def expected(self) -> Expected:
        """Return the expected properties of the subject's graph."""
        shapes = {name: each.shape for name, each in self.input_descriptions().items()}
        return Expected(shapes, self.output_shapes())

    def call(self, module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of the subject's module, or of a copy of it, by name.

        Raises:
            UsageError: If it does not return the tensors that `outputs` names.
            ExportError: If it raises; the message has the sizes of the inputs.
        """
        return self.results.of(functools.partial(self._run, module), self.tree, inputs)

    def _run(self, module: nn.Module, arguments: Mapping[str, Any]) -> Any:
        from attn_export.export.loops import run_plainly

        if not self.restores_state:
            return module(**arguments)
        return run_plainly(module, arguments, self.operators.in_run())


class Layer(Subject):
    """A layer of ours. Its spec says what a user's module shows by runs.

    Args:
        module: The layer, in eval mode.
        spec: Its spec; `module.spec` with another dtype, if the module was cast.
        notes: Notes on the module for the reader of the report.
    """

    spec: AttentionSpec

    def __init__(
        self, module: Attention, spec: AttentionSpec | None = None, *, notes: Sequence[str] = ()
    ) -> None:
        spec = spec or module.spec
        inputs, sizes = spec.inputs(), add_sums(TRACED_SIZES, spec.sums)
        example = to_torch(draw_inputs(inputs, sizes, seed_words=("example",)))
        subject_checks.check_call(module, example, list(spec.output_shapes()))
        tree, outputs = InputTree.flatten(example), tuple(spec.output_shapes())
        axes = {name: named_axes(input_.shape) for name, input_ in inputs.items()}
        labels = [axis for of_input in axes.values() for axis in of_input.values()]
        named = {axis: sizes[axis] for axis in (*labels, *bounds(inputs))}
        self._settle(
            spec=spec, module=module, inputs=dict(tree.tensors), outputs=outputs, axes=axes,
            relations=with_spares(spec.relations), sums=spec.sums, notes=tuple(notes),
            traits=spec.traits, bounds={}, with_least=set[str](), tree=tree,
            example_sizes=add_sums(named, spec.sums), results=Results(outputs),
            operators=Operators(None, any_called=False), function=None,
            files={SPEC: spec.to_toml().encode()},
        )  # fmt: skip

    @functools.cached_property
    def roles(self) -> Roles:
        """What the axes of the inputs do: they have the names of their roles."""
        states = {f"present_{name}": f"past_{name}" for name in self.spec.states}
        return Roles(caches=CACHES if self.spec.has_cache else states)

    def input_descriptions(self) -> dict[str, Input]:
        """Return the description of every input, by name."""
        return self.spec.inputs()

    def output_shapes(self) -> dict[str, Shape]:
        """Return the shape of every output; dynamic axes by name."""
        return self.spec.output_shapes()

    def narrow_dtypes(self) -> dict[str, str]:
        """Return weights, inputs and outputs in float16 or bfloat16 by name, with their types."""
        return {} if self.spec.dtype == "float32" else super().narrow_dtypes()

    def in_float32(self) -> Layer:
        """Return the layer with its weights widened to float32."""
        module: Any = copy_module(self.module).float()
        return Layer(module, dataclasses.replace(self.spec, dtype="float32"))

    def takes(self, sizes: Sizes) -> bool:  # noqa: ARG002 (a layer takes all)
        """Return whether the module runs at these sizes."""
        return True

    def expected(self) -> Expected:
        """Return the expected properties of the subject's graph: one node of attention."""
        return dataclasses.replace(super().expected(), attentions=1, ours=True)

    def _run(self, module: nn.Module, arguments: Mapping[str, Any]) -> Any:
        return module(**arguments)  # without loops
