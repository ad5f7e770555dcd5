"""Subject → canonical graph, with the capture proven and refusals explained."""

from attn_export.export.export import Exported, export

__all__ = ["Exported", "export"]
