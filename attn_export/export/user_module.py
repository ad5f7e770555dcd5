"""Calls of functions in a user's own file, for options that are PATH.py:FUNCTION."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from attn_export.errors import AttnExportError, ExportError, UsageError, one_line
from attn_export.source_location import line_of

if TYPE_CHECKING:
    from attn_export.export.subject import Subject


def load_subject(reference: str, kv_heads: int | None = None) -> Subject:
    """Call a function in a user's file, which must return a subject, or a layer of attention.

    `kv_heads`: The number of key/value heads that those of the layer are mean-pooled to.
    """
    check_reference(reference)
    from torch import nn

    from attn_export.attention import Attention
    from attn_export.export.subject import Subject  # imports torch

    subject = call_function(reference)
    layer = subject.module if isinstance(subject, Subject) else subject
    if isinstance(subject, Subject) and kv_heads is None:
        return subject
    if isinstance(layer, Attention | nn.MultiheadAttention):
        return Subject.from_layer(layer, kv_heads=kv_heads)
    if kv_heads is not None:
        raise UsageError(
            f"--pool-kv-heads {kv_heads}, and {reference} gives a {type(layer).__name__}; it takes "
            "an nn.MultiheadAttention or an attn_export.Attention"
        )
    raise UsageError(f"{reference} returned {type(subject).__name__}, not an attn_export.Subject")


def call_function(reference: str, option: str = "--module") -> Any:
    """Call a function in a user's file, and return what it returns."""
    path, name = check_reference(reference, option)
    try:
        function = getattr(_run(path), name, None)
        if not callable(function):
            raise UsageError(f"{path} has no function {name!r}")
        return function()
    except (AttnExportError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also sys.exit in the user's file
        where = line_of(error) or path.name
        if isinstance(error, SyntaxError) and error.filename:
            where = f"{Path(error.filename).name}:{error.lineno}"
        raise ExportError(f"{reference} raised at {where}: {one_line(error)}") from error


def check_reference(reference: str, option: str = "--module") -> tuple[Path, str]:
    """Return the file and the function of ``PATH.py:FUNCTION``; raise UsageError without a file."""
    path_text, colon, name = reference.rpartition(":")
    path = Path(path_text)
    if not colon or path.suffix != ".py" or not name.isidentifier():
        raise UsageError(f"{option} is PATH.py:FUNCTION; got {reference!r}")
    if not path.is_file():
        raise UsageError(f"{option} {reference}: there is no file {path}")
    return path, name


def _run(path: Path) -> ModuleType:
    """Run a file as a module, which may import other files of its folder."""
    # Under its own name, a file called json.py would replace a standard module. So its name has a
    # prefix, and its folder is last in the path.
    name = f"attn_export_user_module_{path.stem}"
    loader = _SourceLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent.absolute()))
    sys.modules[name] = module
    loader.exec_module(module)
    return module


class _SourceLoader(SourceFileLoader):
    """A loader without cached bytecode, which may be outdated if a file changes within a second."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the current content of the file."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)
