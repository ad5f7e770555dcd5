"""`build --model … --weights-dtype int4 --fit`: the fewest bytes more with which a budget holds."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from attn_export.bundle.quality_vectors import logit_distance, output_distances
from attn_export.errors import UsageError, counted
from attn_export.parts.whole_models.weight_losses import Product, WeightLosses
from attn_export.quality import FLOATING, Budget, Quality
from attn_export.results import Arrays
from attn_export.runtimes.run_options import Progress

_MOST_SINGLE = 100
"""The most projections that are chosen one by one; in larger models, layers are."""

_MOST_DROPPED = 16
"""The most steps that are tried to be taken back."""

_FLOAT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Step:
    """Some products that are wider than before.

    Attributes:
        gain: The noise power that goes, over the power of the signal.
        size: The bytes that these products read more.
    """

    paths: tuple[str, ...]
    dtype: str
    gain: float
    size: int


@dataclasses.dataclass
class Fit:
    """The search for the products of a model that must be wider than the others.

    Steps with the largest gain for each byte come first: as many as are needed for the budgets,
    without those that turn out to be needless.

    Attributes:
        losses: Gives the outputs of a model some of whose products are rounded.
        forms: The products by path for each type of weights, the narrowest first.
        rounds_inputs: Whether products round their inputs. Budgets then hold with and without that.
        runs: The number of runs of the model so far, of all cases together.
    """

    losses: WeightLosses
    forms: Mapping[str, Mapping[str, Product]]
    budgets: Sequence[Budget]
    rounds_inputs: bool
    progress: Progress = dataclasses.field(default_factory=Progress)
    runs: int = 0

    def kept(self) -> dict[str, str]:
        """Return the types of the products that must be wider, by path.

        Raises:
            UsageError: If the budgets hold only if nothing is rounded.
        """
        missed = self.missed({})
        if not missed:
            return {}
        steps = self.steps(missed)
        numbers = range(len(steps) + 1)
        count = bisect.bisect_left(
            numbers, True, lo=1, key=lambda n: not self.missed(types_of(steps[:n]))
        )
        kept = types_of(self._needed(steps[:count])) if count < len(numbers) else {}
        if list(kept.values()).count(FLOATING) == (len(self._paths) if kept else 0):
            raise UsageError(
                f"the budget {self._text} holds only if every weight stays floating; give a lower "
                "one, or leave --weights-dtype out"
            )
        return kept

    def note(self, kept: Mapping[str, str]) -> str:
        """Return a note on what was found."""
        before, after = (self.size(more) / 2**20 for more in ({}, kept))
        return (
            f"fitted to {self._text} in {counted(self.runs, 'run')} of the model: products read "
            f"{after:.3g} MiB of weights, {before:.3g} with all in {self._types[0]}; report.json "
            "and manifest.json name those that are kept"
        )

    @property
    def _types(self) -> list[str]:
        """The types of weights, the narrowest first."""
        return [*self.forms, FLOATING]

    @property
    def _paths(self) -> list[str]:
        return list(self.forms[self._types[0]])

    @property
    def _text(self) -> str:
        return ", ".join(map(str, self.budgets))

    def steps(self, missed: Sequence[str]) -> list[Step]:
        """Return steps to wider types, for each product or layer, the best ones first.

        `missed`: The outputs whose noise is too large.
        """
        groups = [[path] for path in self._paths]
        if len(groups) > _MOST_SINGLE:
            groups = list(self.losses.groups().values())
        steps = []
        before = self._noises(groups, self._types[0], missed)
        for narrow, wide in itertools.pairwise(self._types):
            after = self._noises(groups, wide, missed)
            for group, old, new in zip(groups, before, after, strict=True):
                sizes = [self._size(dict.fromkeys(group, of)) for of in (narrow, wide)]
                steps.append(Step(tuple(group), wide, old - new, sizes[1] - sizes[0]))
            before = after
        return sorted(steps, key=lambda step: -step.gain / step.size)

    def _noises(
        self, groups: Sequence[Sequence[str]], dtype: str, missed: Sequence[str]
    ) -> list[float]:
        """Return the noise over the signal in some outputs, if a group alone is of a type."""
        if dtype == FLOATING:
            return [0.0] * len(groups)
        form = self.forms[dtype]
        choices = [{path: form[path] for path in group} for group in groups]
        made = self._outputs(choices, rounds_inputs=self.rounds_inputs)
        found = [{x.part: x.sqnr for x in self._quality(each).outputs} for each in made]
        return [sum(10 ** (-of[name] / 10) for name in missed if name in of) for of in found]

    def _needed(self, steps: Sequence[Step]) -> list[Step]:
        """Return the steps without those that are needless: what the last one gains more."""
        *before, last = steps
        small = sorted((s for s in before if s.gain < last.gain), key=lambda step: -step.size)
        needed = list(steps)
        for step in small[:_MOST_DROPPED]:
            others = [each for each in needed if each is not step]
            if not self.missed(types_of(others)):
                needed = others
        return needed

    def missed(self, kept: Mapping[str, str]) -> list[str]:
        """Return the outputs that are beyond a budget, without or with rounded inputs."""
        missed = dict[str, None]()
        for rounds_inputs in {False, self.rounds_inputs}:
            quality = self.quality(kept, rounds_inputs=rounds_inputs)
            missed |= dict.fromkeys(text.partition(":")[0] for text in quality.missed)
        return list(missed)

    def quality(self, kept: Mapping[str, str], *, rounds_inputs: bool = False) -> Quality:
        """Return the distances from the float model, if some products are wider."""
        types = self._all(kept).items()
        choice = {path: self.forms[of][path] for path, of in types if of != FLOATING}
        (outputs,) = self._outputs([choice], rounds_inputs=rounds_inputs)
        return self._quality(outputs)

    def size(self, kept: Mapping[str, str]) -> int:
        """Return the bytes of weights that products read, if some are wider."""
        return self._size(self._all(kept))

    def _all(self, kept: Mapping[str, str]) -> dict[str, str]:
        return {path: kept.get(path, self._types[0]) for path in self._paths}

    def _quality(self, outputs: Sequence[Arrays]) -> Quality:
        pairs = {
            name: [(f[name], q[name]) for f, q in zip(self.losses.floats, outputs, strict=True)]
            for name in outputs[0]
        }
        logits = logit_distance(pairs, self.budgets)
        return Quality(output_distances(pairs), tuple(self.budgets), logits)

    def _outputs(
        self, choices: Sequence[Mapping[str, Product]], *, rounds_inputs: bool
    ) -> list[list[Arrays]]:
        self.progress.phase(f"fitting types of weights, {counted(self.runs, 'run')} so far")
        self.runs += len(choices)
        return self.losses.outputs(choices, rounds_inputs=rounds_inputs)

    def _size(self, types: Mapping[str, str]) -> int:
        """Return the bytes of products of some types."""
        return sum(
            _FLOAT_BYTES * math.prod(self.forms[self._types[0]][path].shape)
            if of == FLOATING
            else self.forms[of][path].stored_bytes
            for path, of in types.items()
        )


def types_of(steps: Iterable[Step]) -> dict[str, str]:
    """Return the types of products after some steps, by path."""
    kept = dict[str, str]()
    for step in steps:
        kept |= {path: step.dtype for path in step.paths if kept.get(path) != FLOATING}
    return kept
