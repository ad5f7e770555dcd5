"""Layouts of exported whole models: which files there are, and what inputs and outputs mean.

A layout is a row: how its files are recognised, and what the exporter's own runtime promises. Names
of inputs and outputs do not clash between exporters, so one table of patterns serves all layouts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from attn_export.bundle.manifest import MANIFEST, read_manifest
from attn_export.errors import GraphError, UsageError, choose, first_few, printable
from attn_export.graph.checks import names_read_in
from attn_export.graph.load import load_proto
from attn_export.graph.signature_check import dtype_name, inputs_of
from attn_export.interface import Shape
from attn_export.runtimes.decode_inputs import HIDDEN, LOGIT_INDEX, PAST_LENGTH
from attn_export.untrusted_files import parse_json, read_text

Role = Literal[
    "ids", "mask", "positions", "token types", "features", "states", "states mask", "past",
    "write at", "lengths", "branch", "window", "logits at", "present", "value",
]  # fmt: skip
"""What an input or output is. ``"past"`` and ``"present"`` are caches; ``"write at"`` is the number
of keys in a cache of fixed size before the run, ``"lengths"`` after it; ``"logits at"`` the tokens
whose logits are wanted; ``"value"`` is an output that has the name of a field of the model's
output."""

Promise = Literal["batch", "left", "right", "chunk", "chunks", "ragged"]
"""Use that an exporter's runtime allows: several batch elements, padding on a side, several tokens
after a past in one batch element or in several, batch elements with pasts of unequal length."""

_OF = r"(?:(?P<of>decoder|encoder|self|cross|self_attention_cache|cross_attention_cache)\.)?"
_LAYER = r"(?P<layer>[0-9]{1,4})"
_PART = r"(?P<part>key|value)s?"
_KEPT = r"(?:past_key_values|cache)"  # the latter from transformers 5.24 on
_CACHES = (rf"{_KEPT}\.{_OF}layers\.{_LAYER}\.{_PART}", rf"{_LAYER}\.{_OF}{_PART}")
_WINDOW = rf"(?:(?:in|out)put\.)?{_KEPT}\.layers\.[0-9]{{1,4}}\._sliding_window_tensor"
_ROLES: Final[tuple[tuple[Role, str], ...]] = (
    ("past", rf"input\.{_CACHES[0]}"),
    ("past", rf"past_key_values\.{_CACHES[1]}"),
    ("past", rf"(?P<part>key|value)_cache\.{_LAYER}"),
    ("ids", r"(?:decoder_)?input_ids"),
    ("mask", r"(?:decoder_)?attention_mask"),
    ("positions", r"position_ids"),
    ("token types", r"token_type_ids"),
    ("features", r"input_features|input_values|pixel_values"),
    ("states", r"encoder_hidden_states|encoder_outputs\.last_hidden_state"),
    ("states mask", r"encoder_attention_mask"),
    ("branch", r"use_cache_branch"),
    ("window", _WINDOW),
    ("write at", r"write_indices"),
    ("lengths", r"nonpad_kv_seqlen"),
)
_BUILT_ROLES: Final[tuple[tuple[Role, str], ...]] = (
    *_ROLES,
    ("past", rf"(?:past|(?P<of>cross))_{_PART}_{_LAYER}"),
    ("features", HIDDEN),
    ("write at", PAST_LENGTH),
    ("logits at", LOGIT_INDEX),
)
_OUTPUT_ROLES: Final[tuple[tuple[Role, str], ...]] = (
    ("window", _WINDOW),
    ("present", rf"(?:output\.)?{_CACHES[0]}"),
    ("present", rf"present\.{_CACHES[1]}"),
    ("present", rf"updated_(?P<part>key|value)_cache\.{_LAYER}"),
    ("present", rf"present_{_PART}_{_LAYER}"),
    ("value", rf"(?!(?:output\.)?(?:{_KEPT}\.|past_key_values|present)).*"),
)

_STATES = re.compile(r"(?i).*(conv|ssm|recurrent)\w*[._]?(state|cache)s?.*")
"""Names of caches that hold no keys and values."""

_ENCODER = ("encoder", "cross", "cross_attention_cache")
"""Names of caches of the encoder's keys and values."""

_MOST_GRAPHS = 40
"""The largest number of graphs in a folder."""


@dataclasses.dataclass(frozen=True)
class End:
    """An input or output of a graph.

    Attributes:
        usual: The name that layouts and transformers have for it.
        layer: The number of the layer of a cache.
        part: Whether a cache has keys or values.
        of: Whose cache it is: of the decoder's own tokens, or of the encoder's.
        shape: The declared axes: sizes and names.
    """

    name: str
    role: Role
    dtype: str
    shape: tuple[int | str, ...]
    layer: int = -1
    part: str = ""
    of: str = "decoder"
    usual: str = ""

    @property
    def rolls(self) -> bool:
        """Whether it is a cache of the size of a window: onnxruntime-genai calls it sliding.

        It holds the last keys, in their order, from its first slot on.
        """
        return "sliding" in str(self.shape)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One graph of an exported model.

    Attributes:
        phase: Its name in reports: that of the file, without the ending.
        producer: What it says has made it.
        unread: The inputs that no node reads.
    """

    path: Path
    phase: str
    producer: str
    inputs: Mapping[str, End]
    outputs: Mapping[str, End]
    unread: frozenset[str] = frozenset()

    def having(self, role: Role) -> list[End]:
        """Return the inputs and outputs of a role."""
        return [end for end in (*self.inputs.values(), *self.outputs.values()) if end.role == role]

    @property
    def takes_one_token(self) -> bool:
        """Whether the graph fixes the number of new tokens to one."""
        return any(end.shape[-1] == 1 for end in self.having("ids"))

    @property
    def counts_past(self) -> bool:
        """Whether an input says how many past keys there are, and none which tokens are padding."""
        return bool(self.having("write at")) and not self.having("lengths")

    def one(self, role: Role) -> End | None:
        """Return the input of a role, or None."""
        return next(iter(self.having(role)), None)


@dataclasses.dataclass(frozen=True)
class _ExportLayout:
    """How an exporter writes models.

    Attributes:
        title: Its name in reports.
        marker: A file beside the graphs, the producer that they name, or the name of inputs
            without their numbers; "" for all others.
        promises: What its own runtime allows.
    """

    title: str
    marker: str
    promises: frozenset[Promise]


_ALL: Final[frozenset[Promise]] = frozenset({"batch", "left", "right", "chunk", "chunks"})
BUILT = "attn-export"
LAYOUTS: Final[Mapping[str, _ExportLayout]] = {
    BUILT: _ExportLayout(BUILT, "past_key_", frozenset({"batch", "chunk", "chunks", "ragged"})),
    "transformers": _ExportLayout("transformers exporter", "export.json", _ALL),
    "genai": _ExportLayout(
        "onnxruntime-genai", "onnxruntime-genai", frozenset({"batch", "right", "chunk"})
    ),
    "mobius": _ExportLayout("mobius", "mobius", _ALL),
    "optimum": _ExportLayout("names as of optimum-onnx", "", _ALL),
    "mobius-static": _ExportLayout(
        "mobius, static cache", "mobius", frozenset({"batch", "chunk", "chunks", "ragged"})
    ),
}
"""The layouts by the names of ``--layout``, in the order in which they are recognised."""


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """The graphs of an exported model."""

    layout: _ExportLayout
    entries: tuple[Entry, ...]


def read_export(
    path: Path, layout: str | None = None, names: Mapping[str, str] | None = None
) -> ExportedModel:
    """Read what the graphs in a folder or a file are for.

    `names`: `{name that a layout has: name in the graph}` where they differ.
    """
    if layout is not None and layout not in LAYOUTS:
        raise UsageError(f"unknown layout {printable(layout, 40)!r}; {choose(layout, LAYOUTS)}")
    files = [*_files_of(path)]
    if not files:
        if not (path / MANIFEST).is_file():
            raise GraphError(f"{path} has no .onnx file")
        raise GraphError(
            "compare takes no graphs with fixed sizes or caches in another layout, and "
            f"{path} has no others; build it with --dialect standard, too"
        )
    if len(files) > _MOST_GRAPHS:
        raise GraphError(
            f"{path} has {len(files)} graphs; give a folder with at most {_MOST_GRAPHS}"
        )
    folder = path if path.is_dir() else path.parent
    given = {**_names_of_genai(folder), **{graph: name for name, graph in (names or {}).items()}}
    entries = tuple(
        _entry(file, file.relative_to(folder).with_suffix("").as_posix().replace("/", "-"), given)
        for file in files
    )
    found = _recognised(folder, entries)
    if BUILT in (layout, found) and layout not in (None, found):
        raise UsageError(f"--layout {layout}: the layout of {path} is {found}; leave it out")
    return ExportedModel(LAYOUTS[layout or found], entries)


def _files_of(path: Path) -> Iterator[Path]:
    """Yield the graphs in a folder; of a bundle, those that take its inputs as they are."""
    if not path.is_dir():
        yield path
    elif (path / MANIFEST).is_file():
        for file in read_manifest(path).shipped:
            if not (file.fixed or file.layouts or file.dtypes):
                yield path / file.name
    else:
        yield from sorted(path.glob("*.onnx")) or sorted(path.glob("*/*.onnx"))


def _names_of_genai(folder: Path) -> dict[str, str]:
    """Return the usual names by those that genai_config.json gives inputs and outputs."""
    path = folder / "genai_config.json"
    if not path.is_file():
        return {}
    try:
        values = parse_json(read_text(path))
        decoder = values["model"]["decoder"]
        ends = {**decoder["inputs"], **decoder["outputs"]}
        usual = {
            f"{of}_{part}_names": f"{name}.%d.{part}"
            for of, name in (("past", "past_key_values"), ("present", "present"))
            for part in ("key", "value")
        }
        return {
            str(name).replace("%d", str(n)): usual.get(key, key).replace("%d", str(n))
            for key, name in ends.items()
            for n in range(1000 if "%d" in str(name) else 1)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GraphError(
            f"{path} cannot be read as onnxruntime-genai writes it: {error}"
        ) from error


def _recognised(folder: Path, entries: Sequence[Entry]) -> str:
    shown = {entries[0].producer, *(path.name for path in folder.iterdir() if path.is_file()), ""}
    shown |= {name.rstrip("0123456789") for name in entries[0].inputs}
    is_static = any(entry.one("write at") for entry in entries)
    for name, layout in LAYOUTS.items():
        if layout.marker in shown and is_static <= ("ragged" in layout.promises):
            return name
    return "mobius-static"


def _entry(path: Path, phase: str, names: Mapping[str, str]) -> Entry:
    """Return what the inputs and outputs of a graph are."""
    model = load_proto(path)
    unknown: list[str] = []
    given = inputs_of(model)
    roles = _BUILT_ROLES if any(re.fullmatch(r"past_key_[0-9]+", x.name) for x in given) else _ROLES
    inputs = {x.name: end for x in given if (end := _end(x, roles, names, unknown))}
    outputs = {
        x.name: end for x in model.graph.output if (end := _end(x, _OUTPUT_ROLES, names, unknown))
    }
    _refuse_unknown(model, path, unknown, {end.role for end in inputs.values()})
    if not any(end.role in ("ids", "features", "states") for end in inputs.values()):
        raise GraphError(
            f"{path} has no input_ids and no features: it is no graph of a whole model"
        )
    if any(end.role == "states" for end in inputs.values()) and "attention_mask" in inputs:
        # Where it is the mask of the encoder, the other has a longer name.
        end = inputs["attention_mask"]
        inputs["attention_mask"] = dataclasses.replace(end, role="states mask")
    unread = frozenset(inputs) - names_read_in(model.graph)
    return Entry(path, phase, model.producer_name, inputs, outputs, unread)


def _refuse_unknown(model: Any, path: Path, unknown: Sequence[str], roles: set[Role]) -> None:
    """Refuse inputs and outputs that mean nothing; say that names may be given where that helps."""
    if not unknown:
        ends = [value.name for value in (*inputs_of(model), *model.graph.output)]
        states = [name for name in ends if _STATES.fullmatch(name)]
        if states:
            raise GraphError(f"{path}: {_shown(states)}: caches of states are not supported")
        return
    what = f"{path}: no layout has {_shown(unknown)}"
    if any(map(_STATES.fullmatch, unknown)):
        raise GraphError(f"{what}: caches of states are not supported")
    missing = {"input_ids": "ids", "attention_mask": "mask", "position_ids": "positions"}
    usual = [name for name, role in missing.items() if role not in roles]
    axes = {len(x.type.tensor_type.shape.dim) for x in inputs_of(model) if x.name in unknown}
    if axes <= {2} and (not usual or "features" in roles):
        raise GraphError(f"{what}; inputs of this kind are not supported")
    advice = "say what they are with --name NAME=THEIRS, NAME as another exporter calls it"
    raise GraphError(f"{what}; {advice}")


def _shown(names: Sequence[str]) -> str:
    return first_few([printable(name, 60) for name in names])


def _end(
    value: Any, roles: Sequence[tuple[Role, str]], names: Mapping[str, str], unknown: list[str]
) -> End | None:
    end = _end_of(value.name, dtype_name(value), (), names.get(value.name, value.name), roles)
    if end is None:
        unknown.append(value.name)
        return None
    return dataclasses.replace(end, shape=tuple(_axes(value, end.role)))


def _end_of(
    name: str, dtype: str, shape: tuple[int | str, ...], usual: str,
    roles: Sequence[tuple[Role, str]],
) -> End | None:  # fmt: skip
    """Return what an input or output is by its usual name; None if no layout has it."""
    for role, pattern in roles:
        match = re.fullmatch(pattern, usual)
        if match:
            groups = match.groupdict()
            return End(
                name, role, dtype, shape, int(groups.get("layer") or -1), groups.get("part") or "",
                "encoder" if groups.get("of") in _ENCODER else "decoder", usual,
            )  # fmt: skip
    return None


def built_ends(
    types: Mapping[str, tuple[str, Shape]], *, are_outputs: bool = False
) -> dict[str, End]:  # fmt: skip
    """Return what inputs, or outputs, of graphs that we build are, by name."""
    roles = _OUTPUT_ROLES if are_outputs else _BUILT_ROLES
    ends = (_end_of(name, *each, name, roles) for name, each in types.items())
    return {end.name: end for end in ends if end is not None}


def _axes(value: Any, role: Role) -> Iterator[int | str]:
    for dim in value.type.tensor_type.shape.dim:
        text = dim.dim_param
        # In outputs "1" is the size of the exporter's example.
        is_size = text.isascii() and text.isdigit() and role != "value"
        yield int(text) if is_size else text or dim.dim_value
