"""attn-export: PyTorch attention to ONNX, proven in every runtime it ships to.

The names below are the public interface. They are imported at first use, so that
`import attn_export` and everything that needs no torch work without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_export.attention import (
        Attention,
        GroupedQueryAttention,
        MultiHeadAttention,
        MultiQueryAttention,
    )
    from attn_export.attention.pooling import pool_kv_heads
    from attn_export.commands.assert_parity import assert_parity
    from attn_export.commands.build import build
    from attn_export.commands.verify import verify
    from attn_export.errors import (
        AttnExportError,
        BundleError,
        ExportError,
        GraphError,
        OutputError,
        ParityError,
        RuntimeFailure,
        SpecError,
        UsageError,
        WeightsError,
    )
    from attn_export.export.subject import Subject
    from attn_export.export.trees import Axis
    from attn_export.results import Report
    from attn_export.runtimes.decode_session import DecodeSession
    from attn_export.spec import AttentionSpec

__version__: str

_MODULES = {
    "Attention": "attn_export.attention",
    "AttentionSpec": "attn_export.spec",
    "AttnExportError": "attn_export.errors",
    "Axis": "attn_export.export.trees",
    "BundleError": "attn_export.errors",
    "DecodeSession": "attn_export.runtimes.decode_session",
    "ExportError": "attn_export.errors",
    "GraphError": "attn_export.errors",
    "GroupedQueryAttention": "attn_export.attention",
    "MultiHeadAttention": "attn_export.attention",
    "MultiQueryAttention": "attn_export.attention",
    "OutputError": "attn_export.errors",
    "ParityError": "attn_export.errors",
    "Report": "attn_export.results",
    "RuntimeFailure": "attn_export.errors",
    "SpecError": "attn_export.errors",
    "Subject": "attn_export.export.subject",
    "UsageError": "attn_export.errors",
    "WeightsError": "attn_export.errors",
    "assert_parity": "attn_export.commands.assert_parity",
    "build": "attn_export.commands.build",
    "pool_kv_heads": "attn_export.attention.pooling",
    "verify": "attn_export.commands.verify",
}

__all__ = [
    "Attention",
    "AttentionSpec",
    "AttnExportError",
    "Axis",
    "BundleError",
    "DecodeSession",
    "ExportError",
    "GraphError",
    "GroupedQueryAttention",
    "MultiHeadAttention",
    "MultiQueryAttention",
    "OutputError",
    "ParityError",
    "Report",
    "RuntimeFailure",
    "SpecError",
    "Subject",
    "UsageError",
    "WeightsError",
    "assert_parity",
    "build",
    "pool_kv_heads",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("attn-export")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from attn_export.system_info import missing_package

        package = (error.name or "").partition(".")[0]
        raise ModuleNotFoundError(missing_package(package), name=error.name) from None


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
