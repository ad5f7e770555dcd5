"""A subject of narrow types in float32."""

from __future__ import annotations

import dataclasses

import torch

from attn_export.attention.wide_buffers import NARROW
from attn_export.errors import ExportError
from attn_export.export.module_state import copied
from attn_export.export.subject import Subject


def in_float32(subject: Subject) -> Subject:
    """Return a subject with its weights and inputs widened to float32.

    Raises:
        ExportError: If the module does not run so.
    """
    spec = dataclasses.replace(subject.spec, dtype="float32") if subject.spec else None
    wide = {n: t.float() if t.dtype in NARROW else t for n, t in subject.inputs.items()}
    twin = Subject(
        copied(subject.module).float(), subject.tree.rebuild(wide), subject.axes, subject.outputs,
        relations=subject.relations, spec=spec,
    )  # fmt: skip
    twin.bounds, twin.function = subject.bounds, subject.function
    try:
        with torch.inference_mode():
            twin.call(twin.module, twin.inputs)
    except ExportError as error:
        raise ExportError(
            f"in its float32 copy, {error}; write .to(x.dtype) for types that are fixed, and "
            "make constants buffers"
        ) from error
    return twin
