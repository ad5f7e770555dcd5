"""`Subject`: a module with named inputs, named dynamic axes and named outputs."""

from attn_export.subject.subject import Subject

__all__ = ["Subject"]
