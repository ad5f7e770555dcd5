"""The job behind `kit`: write a program that loads, runs and tests a bundle in some language.

A kit is a copy of a template in `sources/`, rendered with facts about the bundle.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from attn_export.bundle.golden import read_index
from attn_export.bundle.manifest import (
    GOLDEN,
    MANIFEST,
    bundle_spec,
    bundles_in,
    read_bundle,
    read_manifest,
)
from attn_export.bundle.text_ends import TOKENIZER, Generation, read_generation
from attn_export.bundle.text_inputs import CHOICE, TEXTS, read_text_inputs
from attn_export.code_templates import render
from attn_export.dialect_names import ORT, ORT_NEEDED, PORTABLE, STANDARD, WEIGHTS
from attn_export.errors import UsageError, choose
from attn_export.interface import Roles
from attn_export.output_folder import replaceable, replacement_of, write_errors
from attn_export.parts.kits.kit_escapes import KIT_ESCAPES
from attn_export.parts.kits.source_folders import KITS
from attn_export.results import BASE, WHOLE_DECODE
from attn_export.rule import beyond_limit
from attn_export.runtimes.decode_inputs import (
    ENCODED,
    IDS,
    LOGIT_INDEX,
    MASK,
    MOST_KEYS,
    PAST_LENGTH,
)
from attn_export.runtimes.run_options import Progress
from attn_export.schema import (
    CaseEntry,
    GoldenIndex,
    GraphFile,
    Manifest,
    TensorSignature,
    Tolerance,
)
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import is_floating, numpy_dtype
from attn_export.tensorproto import CODES

# -- the languages that there is a kit for ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Language:
    """A language that there is a kit for.

    Attributes:
        folders: Folders and files, relative to `KITS`, and the path in the kit of each.
        unsupported_dtypes: Types of inputs that the interface of the engine does not have.
        test: The commands that build a kit and run its self-test.
    """

    folders: Mapping[str, str]
    dialects: tuple[str, ...]
    unsupported_dtypes: frozenset[str]
    test: tuple[str, ...]


_ORT_FIRST = (ORT, STANDARD, PORTABLE)
BFLOAT16 = frozenset({"bfloat16"})

ORT_PLACEHOLDER = "/path/to/onnxruntime"
PACKAGE = "../../.."
"""The folder of the package, relative to `KITS`."""

_ROOT = f"-DONNXRUNTIME_ROOT={ORT_PLACEHOLDER}"
_CMAKE = (f"cmake -S . -B build {_ROOT}", "cmake --build build")
_BUILD_LIBRARY = (f"cmake -S library -B library/build {_ROOT}", "cmake --build library/build")


def _library(folder: str, test: tuple[str, ...], **sources: str) -> _Language:
    """Return a language whose kit has the library of the kit in C in a folder."""
    library = {"c/CMakeLists.txt": "CMakeLists.txt", "c/src": "src", "core": "core"}
    folders = {source: f"{folder}/{target}" for source, target in library.items()}
    return _Language({**folders, "bindings": ".", **sources}, _ORT_FIRST, frozenset(), test)


_C = _library(".", (*_CMAKE, "build/self_test"))
LANGUAGES: Mapping[str, _Language] = {
    "c": _C,
    "cpp": _library("library", (*_CMAKE, "build/attn self-test"), cpp="."),
    "library": _C,
    "rust": _library(
        "library",
        (*_BUILD_LIBRARY, "cargo build --release", "cargo run --release -- self-test"),
        rust=".",
    ),
    "go": _library("library", (*_BUILD_LIBRARY, "go build -o attn .", "./attn self-test"), go="."),
    "java": _library(
        "library",
        (*_BUILD_LIBRARY, "javac -d build -cp /usr/share/java/jna.jar AttnExport.java Attn.java",
         "java -cp build:/usr/share/java/jna.jar Attn self-test"),
        java=".",
    ),
    "csharp": _library(
        "library",
        (*_BUILD_LIBRARY, "cp library/build/libattn_export.so .",
         "mcs -out:attn.exe AttnExport.cs Attn.cs", "mono attn.exe self-test"),
        csharp=".",
    ),
    "node": _Language(
        {"node": ".", "javascript": ".", "js": "src"}, _ORT_FIRST, BFLOAT16,
        ("npm ci --ignore-scripts", "npm test"),
    ),
    # WebGPU computes contrib operators wrong, and has no Attention.
    "web": _Language(
        {"web": ".", "javascript": ".", "js": "lib"}, (PORTABLE,), BFLOAT16,
        ("npm ci --ignore-scripts", "npm start"),
    ),
    "python": _Language(
        {"python": ".",
         f"{PACKAGE}/measures.py": "attn_kit/measures.py",
         f"{PACKAGE}/rule.py": "attn_kit/rule.py",
         f"{PACKAGE}/tensorproto.py": "attn_kit/tensorproto.py",
         f"{PACKAGE}/runtimes/eight_bit_sums.py": "attn_kit/eight_bit_sums.py"},
        _ORT_FIRST, BFLOAT16,
        ("python3 -m venv .venv", ".venv/bin/pip install .", ".venv/bin/attn-kit-test"),
    ),
}  # fmt: skip


# -- the job -----------------------------------------------------------------------------------

BUNDLE, ENCODER = "bundle", "encoder"
_MASKS = {
    "bool": "In `attn_mask`, True (1) means that the query may attend to the key, as in PyTorch's\n"
    "`scaled_dot_product_attention`; `nn.MultiheadAttention` has the inverse. A query without True "
    "gets 0 from its attention.",
    "float": "`attn_mask` is added to the scores: 0 where the query may attend to the key, `-inf` "
    "where it may not.",
    None: "",
}


def write_kit(
    language: str,
    bundle: Path,
    output: Path,
    dialect: str | None = None,
    progress: Progress | None = None,
    read: Callable[[Path], Manifest] = read_bundle,
) -> Path:
    """Write a kit: a project with a copy of the bundle; return the kit's folder.

    `read`: Returns the manifest of a bundle, and refuses one whose cases prove nothing.
    """
    if language not in LANGUAGES:
        raise UsageError(f"unknown language {language!r}; {choose(language, LANGUAGES)}")
    project, progress = LANGUAGES[language], progress or Progress()
    with write_errors(output):  # before anything is read
        replaceable(output, "kit")
    progress.phase("reading the bundle")
    bundle, encoder = _parts(bundle, language)
    manifest = read(bundle)
    _refuse_dtypes(language, project, manifest)
    graphs = manifest.shipped
    graph = _graph_for(graphs, project.dialects, dialect)
    decode = _decode_graph_for(graphs, graph, Roles(manifest.roles).axis(NEW))
    spec = bundle_spec(bundle, manifest)
    index = read_index(bundle / GOLDEN)
    # Of a large model, some cases are stored in part.
    index = structs.replace(index, cases=[case for case in index.cases if not case.shapes])
    if not index.cases:
        raise UsageError(f"{bundle} has no case that is stored whole, which kits test")
    context = _facts(manifest, index, spec, graph, decode)
    from markupsafe import Markup  # with jinja2, which few commands need

    # Constants, which need no escape.
    commands = [Markup(command) for command in project.test]
    context["mask_says"] = Markup(_MASKS[context["mask"]])
    context |= {"language": "library" if language == "c" else language, "commands": commands}
    context["ids"] = _ids(manifest, read_generation(bundle))
    context["encoder"] = encoder and _encoder(read(encoder), graph, context)
    context["texts"] = _texts(manifest, bundle)
    progress.phase("writing the kit")
    with replacement_of(output, "kit") as folder:
        copy_sources(project, folder)
        for template in sorted(folder.rglob(f"*{TEMPLATE}")):
            text = render(template, context, KIT_ESCAPES)
            template.with_suffix("").write_text(text, encoding="utf-8")
            template.unlink()
        for source, target in ((bundle, BUNDLE), *([(encoder, ENCODER)] if encoder else [])):
            for name in (*read_manifest(source).files, MANIFEST):
                (folder / target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, folder / target / name)
    return output


def _parts(bundle: Path, language: str) -> tuple[Path, Path | None]:
    """Return the bundle of a kit and, of an encoder-decoder, that of its encoder."""
    there = bundles_in(bundle)
    if not there.keys() >= {ENCODER, "decoder"}:
        return bundle, None
    if language not in ("c", "library"):
        raise UsageError(
            f"{bundle} is an encoder-decoder, which kits in c and library run; give one of its "
            "two folders"
        )
    return there["decoder"], there[ENCODER]


def _encoder(manifest: Manifest, decoder: GraphFile, context: dict[str, Any]) -> dict[str, Any]:
    """Return what `attn_encode` needs of the encoder for a decoder, and add its files."""
    graph = _graph_for(manifest.shipped, [decoder.dialect], None)
    names = [graph.name, *(name for name in manifest.files if name == WEIGHTS)]
    context["files"] += [f"../{ENCODER}/{name}" for name in names]
    return {
        "file": f"../{ENCODER}/{graph.name}",
        "inputs": _values(manifest, manifest.inputs, graph.layouts),
    }


def _refuse_dtypes(name: str, project: _Language, manifest: Manifest) -> None:
    for end, signature in manifest.ends.items():
        if signature.dtype in project.unsupported_dtypes:
            raise UsageError(
                f"{end} is {signature.dtype}, which the {name} kit cannot hold; the c and cpp kits "
                "can, or build the bundle in float32 or float16"
            )


# -- facts about a bundle for the templates of a kit --------------------------------------------

NEW, PAST = "query_len", "past_len"
ENOUGH = 16
"""Preferred number of tokens of a replay: enough to show faults, few enough to be quick."""


def _graph_for(
    graphs: Sequence[GraphFile], dialects: Sequence[str], wanted: str | None
) -> GraphFile:
    """Return the graph that a kit runs, which must take any number of tokens."""
    if wanted is not None and wanted not in dialects:
        raise UsageError(f"this kit runs {', '.join(dialects)}, not {wanted}")
    for dialect in [wanted] if wanted else dialects:
        for graph in graphs:
            if graph.dialect == dialect and not graph.fixed:
                return graph
    have = ", ".join(sorted({graph.dialect for graph in graphs}))
    raise UsageError(
        f"no graph of the bundle is for this kit: it runs {wanted or ', '.join(dialects)}, and the "
        f"bundle has {have}; build it with --dialect all"
    )


def _decode_graph_for(graphs: Sequence[GraphFile], graph: GraphFile, new: str) -> GraphFile | None:
    """Return the graph for single tokens of the same dialect and cache layout, or None."""
    return next(
        (
            other for other in graphs
            if (other.dialect, dict(other.layouts)) == (graph.dialect, dict(graph.layouts))
            and dict(other.fixed) == {new: 1}
        ),
        None,
    )  # fmt: skip


def _facts(
    manifest: Manifest,
    index: GoldenIndex,
    spec: AttentionSpec | None,
    graph: GraphFile,
    decode: GraphFile | None = None,
) -> dict[str, Any]:
    """Return the values of a kit's templates by name; `decode` is the graph for single tokens."""
    names = [file.name for file in (graph, decode) if file is not None]
    outputs = _values(manifest, manifest.outputs, graph.layouts)
    role = Roles(manifest.roles).name
    sizes = [(case.name, {role(a): n for a, n in case.sizes.items()}) for case in index.cases]
    mask = manifest.inputs.get("attn_mask") if spec else None  # others' masks may mean the inverse
    return {
        "name": manifest.name,
        "version": manifest.versions.get("attn-export", ""),
        "ort_needed": max(
            (manifest.graphs[name].needs.onnxruntime or ORT_NEEDED for name in names),
            key=lambda version: [int(part) for part in version.split(".")],
        ),
        "graph": {
            "file": graph.name,
            "dialect": graph.dialect,
            "bound": dict(graph.bound),
            "decode": decode.name if decode else None,
            "rounds_inputs": bool(graph.exact),
            "layouts": {name: list(order) for name, order in graph.layouts.items()},
        },
        "files": [*names, *(name for name in manifest.files if name == WEIGHTS)],
        "inputs": _values(manifest, manifest.inputs, graph.layouts),
        "mask": mask and ("bool" if mask.dtype == "bool" else "float"),
        "sizes": dict(sizes).get(BASE, {}),
        "first_step": next((of_case for _, of_case in sizes if of_case.get(PAST) == 0), {}),
        "outputs": outputs,
        "cases": [
            {
                "name": case.name,
                "folder": case.folder,
                "ignored_rows": case.ignored_rows,
                "tolerances": [
                    tolerance_of(
                        (case.rounded if graph.exact else case.tolerance).get(name),
                        case.uncompared.get(name),
                        signature.dtype,
                        has_limit=not graph.exact,
                    )
                    for name, signature in manifest.outputs.items()
                ],
            }
            for case in index.cases
        ],
        "cache": _cache(manifest),
        "replay": _replay(spec, index.cases),
    }


def _values(
    manifest: Manifest, signatures: Mapping[str, TensorSignature], layouts: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return facts about inputs or outputs, with axes by role, and the output that a cache takes.

    Axis i of the graph is axis `order[i]` of the signature; `graph_axes` are the axes of the graph.
    """
    values, roles = [], Roles(manifest.roles)
    presents = {past: present for present, past in manifest.next_inputs.items()}
    for name, signature in signatures.items():
        axes, dtype = list(roles.shape(signature.shape, name)), signature.dtype
        order = list(layouts.get(name, range(len(axes))))
        values.append(
            {
                "name": name, "dtype": dtype, "code": CODES[dtype], "axes": axes, "order": order,
                "graph_axes": [axes[axis] for axis in order], "present": presents.get(name),
            }
        )  # fmt: skip
    return values


def tolerance_of(
    tolerance: Tolerance | None, uncompared: str | None, type_name: str, *, has_limit: bool = True
) -> dict[str, Any]:
    """Return the tolerance of an output, or the reason that the output is not compared.

    The reason is `uncompared`, or `beyond_limit` if the tolerance is too large, and has a limit.
    """
    dtype, beyond = numpy_dtype(type_name), ""
    if uncompared is not None:
        # An empty text is no reason.
        uncompared = " ".join(uncompared.split()) or "no reason is stated"
    elif tolerance and is_floating(dtype) and has_limit:
        beyond = beyond_limit(tolerance.whole, tolerance.row, dtype)
    if uncompared or beyond or not is_floating(dtype):
        tolerance = None
    return {"allowed": tolerance, "unusable": uncompared or "", "beyond_limit": beyond}


def _cache(manifest: Manifest) -> str:
    """Return the kind of the cache of a bundle, as in `AttentionSpec`."""
    kind = "in-place" if "past_length" in manifest.inputs else "append"
    return kind if manifest.next_inputs else "none"


_PROCESSED = (
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "forced_decoder_ids", "lang_to_id", "repetition_penalty",
)  # fmt: skip
"""What a generation config may ask for and kits do not do."""


def _ids(manifest: Manifest, said: Generation) -> dict[str, Any] | None:
    """Return what tokens of a whole model need: sizes, and ids that end a text; None of others."""
    own = {IDS, PAST_LENGTH, LOGIT_INDEX} | set(manifest.next_inputs.values())
    own |= {name for name, x in manifest.inputs.items() if ENCODED in x.shape}
    logits = manifest.outputs.get("logits")
    vocabulary = logits.shape[-1] if logits and logits.shape else None
    if not isinstance(vocabulary, int) or not {IDS, PAST_LENGTH} <= set(manifest.inputs) <= own:
        return None
    most = manifest.bounds.get("capacity", (0, None))[1] or MOST_KEYS
    text = TOKENIZER in manifest.files
    first = said.bos_token_id if said.decoder_start_token_id is None else (
        said.decoder_start_token_id
    )  # fmt: skip
    return {
        "vocabulary": vocabulary, "most": most, "ends": [*said.ends], "text": text,
        "first": -1 if first is None else first,
        "unused": [name for name in _PROCESSED if getattr(said, name) is not None],
    }  # fmt: skip


def _texts(manifest: Manifest, bundle: Path) -> dict[str, Any] | None:
    """Return what `attn_embed` needs of an encoder of texts; None of others."""
    output = next((name for name in CHOICE if name in manifest.outputs), "")
    shape = manifest.outputs[output].shape if output else ()
    width = shape[1] if len(shape) == 2 else None
    own = {IDS, MASK, "token_type_ids"}
    if not isinstance(width, int) or not {IDS} <= set(manifest.inputs) <= own:
        return None
    if TEXTS not in manifest.files or {x.dtype for x in manifest.inputs.values()} != {"int64"}:
        return None
    said = read_text_inputs(bundle)
    return {
        "vocabulary": said.vocabulary, "most": said.max_length, "pad": said.pad_id, "width": width,
        "output": [*manifest.outputs].index(output), "pads_left": said.padding_side == "left",
        "types": "token_type_ids" in manifest.inputs,
    }  # fmt: skip


def _replay(spec: AttentionSpec | None, cases: Sequence[CaseEntry]) -> str | None:
    """Return the name of a case that gives the same results if it is run token by token."""
    if spec is None or not spec.causal or spec.cache == "none":
        return None
    # Some layers rotate keys by the length of the step.
    if spec.turns_by_length:
        return None
    kinds = ("shape", WHOLE_DECODE) if spec.in_place else ("shape",)
    fitting = [
        case for case in cases
        if case.kind in kinds and case.sizes.get(PAST) == 0 and case.sizes.get(NEW, 0) > 1
    ]  # fmt: skip
    lengths = {case.name: case.sizes[NEW] for case in fitting}
    # The shortest case of at least `ENOUGH` tokens, or else the longest case.
    return min(lengths, key=lambda n: (lengths[n] < ENOUGH, abs(lengths[n] - ENOUGH)), default=None)


# -- files of a kit -----------------------------------------------------------------------------

TEMPLATE = ".j2"
"""Suffix of the files that are rendered; others are copied."""

_LEFT_OUT = shutil.ignore_patterns("__pycache__", "node_modules", "build")


def copy_sources(language: _Language, folder: Path) -> None:
    """Copy the files of a kit without rendering templates."""
    for source, target in language.folders.items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        if (KITS / source).is_file():
            shutil.copyfile(KITS / source, folder / target)
        else:
            shutil.copytree(KITS / source, folder / target, dirs_exist_ok=True, ignore=_LEFT_OUT)
