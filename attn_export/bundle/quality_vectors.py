"""Outputs of the unquantised model, stored with the golden vectors, and distances from them.

`golden/quality.json` names the cases and the budgets. `float_I.pb` is the float64 output of the
unquantised model, rounded to the output's type; it lies next to `output_I.pb`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.bundle.golden import data_set, read_index
from attn_export.errors import BundleError, UsageError
from attn_export.quality import OF_LOGITS, Budget, LogitDistance, Quality, is_finite
from attn_export.results import Arrays, Case, Golden
from attn_export.schema import Distance, QualityFile
from attn_export.untrusted_files import checked, parse_json, read_text

if TYPE_CHECKING:
    import numpy as np

QUALITY = "quality.json"
FLOAT = "float"
MOST_ROWS, CASES = 64, 4
"""The most queries of a case, in all batch elements together, and the number of cases. The largest
cases of random inputs are chosen."""

Pairs = Iterable[tuple["np.ndarray", "np.ndarray"]]
"""Pairs of an output of the unquantised model and the same output of the quantised one."""


def quality_cases(goldens: Sequence[Golden]) -> list[int]:
    """Return the indices of the cases in which distances are measured; inputs are random."""
    plain = {
        number: math.prod(next(iter(golden.expected.values())).shape[:-1])
        for number, golden in enumerate(goldens)
        if is_plain(golden.case)
    }
    fitting = [number for number, rows in plain.items() if rows <= MOST_ROWS] or list(plain)[:1]
    return sorted(sorted(fitting, key=lambda number: -plain[number])[:CASES])


def is_plain(case: Case) -> bool:
    """Return whether the inputs of a case are plain random numbers."""
    return case.kind == "shape" and not case.contents and not case.ignored_rows


def distance(part: str, pairs: Pairs) -> Distance:
    """Return the distance of the quantised model from the unquantised one, over several cases.

    Rows that are equal in both do not count: they are copies of inputs, or fully masked.

    `pairs`: Pairs of arrays of one shape, with rows along the last axis.
    """
    sums = Sums()
    for f, q in pairs:
        sums.add(f, q)
    return sums.distance(part)


class Sums:
    """Sums over pairs of arrays, from which their distance follows."""

    def __init__(self) -> None:
        self._signal = self._noise = self._other = self._product = self._row = 0.0
        self._rows, self._divergence, self._same = 0, 0.0, 0

    def add(self, whole_f: np.ndarray, whole_q: np.ndarray, *, as_logits: bool = False) -> None:
        """Add a pair of arrays of one shape, with rows along the last axis."""
        import numpy as np

        f, q = (np.atleast_2d(a.astype(np.float64)) for a in (whole_f, whole_q))
        f, q = (a.reshape(-1, a.shape[-1]) for a in (f, q))
        changed = (f != q).any(axis=-1)
        f, q = f[changed], q[changed]
        if as_logits:
            self._add_logits(f, q)
        usable = np.isfinite(f) & np.isfinite(q)
        f, q = np.where(usable, f, 0.0), np.where(usable, q, 0.0)
        rows_f, rows_n = np.square(f).sum(axis=-1), np.square(q - f).sum(axis=-1)
        self._signal += float(rows_f.sum())
        self._noise += float(rows_n.sum())
        self._other += float(np.square(q).sum())
        self._product += float((f * q).sum())
        shares = rows_n[rows_f > 0] / rows_f[rows_f > 0]
        self._row = max(self._row, math.sqrt(float(shares.max(initial=0.0))))

    def _add_logits(self, f: np.ndarray, q: np.ndarray) -> None:
        import numpy as np

        log_f, log_q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (f, q))
        share = np.exp(log_f)
        with np.errstate(invalid="ignore"):
            apart = np.where(share > 0, log_f - log_q, 0.0)  # -inf in both is no distance
        self._divergence += float((share * apart).sum())
        self._same += int((f.argmax(axis=-1) == q.argmax(axis=-1)).sum())
        self._rows += len(f)

    def distance(self, part: str) -> Distance:
        """Return the distance of all pairs."""
        signal, noise, powers = self._signal, self._noise, self._signal * self._other
        sqnr = 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else math.inf
        cosine = self._product / math.sqrt(powers) if powers > 0 else math.nan
        return Distance(part, round(sqnr, 4), round(cosine, 9), round(self._row, 9))

    def logits(self, part: str) -> LogitDistance:
        """Return the distance of the pairs that were added as logits."""
        if not self._rows:
            return LogitDistance(part, 0.0, 1.0)
        kl = max(self._divergence, 0.0) / self._rows
        return LogitDistance(part, round(kl, 12), round(self._same / self._rows, 9))


def logit_distance(
    pairs: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]], budgets: Sequence[Budget]
) -> tuple[LogitDistance, ...]:
    """Return the distance of the first output, read as logits, if a budget limits it."""
    if not any(budget.measure in OF_LOGITS for budget in budgets):
        return ()
    part, arrays = next(iter(pairs.items()))
    sums = Sums()
    for f, q in arrays:
        sums.add(f, q, as_logits=True)
    return (sums.logits(part),)


def output_distances(
    pairs: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]],
) -> tuple[Distance, ...]:
    """Return the distance of each output that differs."""
    return tuple(filter(is_finite, (distance(name, arrays) for name, arrays in pairs.items())))


def measure_outputs(
    floats: Sequence[Arrays], goldens: Sequence[Golden], budgets: Sequence[Budget]
) -> tuple[Quality, list[Arrays]]:
    """Measure outputs of a quantised module against those of the unquantised one.

    Returns:
        The distances, and the latter outputs in the types of the former.
    """
    stored = [_as_stored(f, golden.expected) for f, golden in zip(floats, goldens, strict=True)]
    pairs = _pairs_of(with_floats(goldens, dict(enumerate(stored))))
    logits = logit_distance(pairs, budgets)
    return Quality(output_distances(pairs), tuple(budgets), logits), stored


def _as_stored(outputs: Arrays, expected: Arrays) -> Arrays:
    """Return outputs of the unquantised module in the types of the expected outputs."""
    from attn_export.tensorfile import is_floating

    # Expected outputs that are not floating, such as a cache of integers, stay as they are.
    return {
        name: outputs[name].astype(t.dtype) if is_floating(t.dtype) else t
        for name, t in expected.items()
    }


def write_quality(
    folder: Path, numbers: Sequence[int], floats: Sequence[Arrays], quality: Quality
) -> None:
    """Write the outputs of the unquantised model, and name the cases."""
    from attn_export.tensorfile import write_tensors

    for number, outputs in zip(numbers, floats, strict=True):
        write_tensors(folder / data_set(number), FLOAT, outputs)
    content = {
        "cases": list(numbers),
        "budgets": [str(budget) for budget in quality.budgets],
    }
    (folder / QUALITY).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def with_floats(goldens: Sequence[Golden], floats: Mapping[int, Arrays]) -> list[Golden]:
    """Return golden vectors with the outputs of the unquantised model, by the index of the case."""
    return [
        dataclasses.replace(golden, floats=floats.get(number, {}))
        for number, golden in enumerate(goldens)
    ]


def claim_notes(quality: Quality | None, budgets: Sequence[Budget], spec: str) -> tuple[str, ...]:
    """Return a note on what nothing but the bundle itself says of a quantised layer."""
    if quality is None and quantised_parts(spec):
        return ("the float weights are unknown: the bundle's own claim, so there is no budget",)
    if quality is None or budgets:
        return ()
    stated = ", ".join(map(str, quality.budgets))
    return (f"the budget {stated} is the bundle's own claim; --budget sets another",)


def quantised_parts(spec: str) -> set[str]:
    """Return the fields by which a layer is quantised, from the text of its spec."""
    # `verify` starts sooner without a parser of TOML.
    lines = (line.replace(" ", "").partition("=") for line in spec.splitlines())
    fields = {name: value for name, _, value in lines}
    return {n for n in ("weights_dtype", "kv_dtype") if fields.get(n, '"none"') != '"none"'}


def measured_folders(folder: Path) -> list[str]:
    """Return the folders of the cases in which distances were measured; none if there are none."""
    path = folder / QUALITY
    if not path.is_file():
        return []
    return [data_set(number) for number in checked(parse_json(read_text(path)), QualityFile).cases]


def read_quality(
    folder: Path, goldens: Sequence[Golden], budgets: Sequence[Budget], spec: str = ""
) -> tuple[Quality | None, Sequence[Golden]]:
    """Return the distances of the stored outputs from those of the unquantised model.

    `spec`: The text of the bundle's spec, by which the distances are part of the evidence; "" if
    the bundle has none.

    Returns:
        The distances, None if the bundle is not quantised or its float model is unknown; and the
        golden vectors with the outputs of that.
    """
    quantised = quantised_parts(spec)
    if not (folder / QUALITY).is_file():
        if quantised:
            raise BundleError(
                f"the stored test cases prove nothing: {folder / QUALITY} is missing, by which a "
                "quantised layer is compared with the float one; build the bundle again"
            )
        return None, goldens
    try:
        content = checked(parse_json(read_text(folder / QUALITY)), QualityFile)
        if not content.cases and "kv_dtype" in quantised:
            raise ValueError("it names no case")  # only float weights may be unknown
        goldens = with_floats(goldens, _read_floats(folder, content.cases, goldens))
        pairs = _pairs_of([golden for golden in goldens if golden.floats])
        limits = tuple(budgets) or tuple(map(Budget.parse, content.budgets))
        outputs = output_distances(pairs)
        if pairs and not any(distance.part == next(iter(pairs)) for distance in outputs):
            raise ValueError("the outputs of the float model are those of the quantised one")
    except (OSError, ValueError, KeyError, UsageError) as error:
        raise BundleError(f"{folder / QUALITY} cannot be used: {error}; build again") from error
    if not pairs:
        return None, goldens
    return Quality(outputs, limits, logit_distance(pairs, limits)), goldens


def _read_floats(
    folder: Path, numbers: Sequence[int], goldens: Sequence[Golden]
) -> dict[int, Arrays]:
    """Return the outputs of the unquantised model, by the index of the case."""
    from attn_export.tensorfile import read_tensors

    floats = dict[int, Arrays]()
    indices = {case.folder: at for at, case in enumerate(read_index(folder).cases)}
    for number in numbers:
        if data_set(number) not in indices:
            raise ValueError(f"there is no case {number}")
        expected = goldens[indices[data_set(number)]].expected
        found = read_tensors(folder / data_set(number), FLOAT, list(expected))
        for name, q in expected.items():
            if (found[name].shape, found[name].dtype) != (q.shape, q.dtype):
                raise ValueError(f"case {number} has two shapes or types of {name}")
        floats[indices[data_set(number)]] = found
    return floats


def _pairs_of(goldens: Sequence[Golden]) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Return the floating outputs of the unquantised and of the quantised model, by name."""
    from attn_export.tensorfile import is_floating

    return {
        name: [(golden.floats[name], golden.expected[name]) for golden in goldens]
        for name, q in (goldens[0].expected if goldens else {}).items()
        if is_floating(q.dtype)
    }
