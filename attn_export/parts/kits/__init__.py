"""Kits: programs in other languages that run a bundle, and the runtimes that run their code."""

from attn_export.optional_parts import Part
from attn_export.parts.kits.toolchains import TOOLCHAINS, required

_NATIVE = dict.fromkeys(("c", "cpp"), f"{__name__}.native")
_JAVASCRIPT = dict.fromkeys(("node", "wasm", "webgpu"), f"{__name__}.javascript")

PART = Part(
    commands={"kit": f"{__name__}.kit_command"},
    runtimes=_NATIVE | _JAVASCRIPT,
    installs=_NATIVE | _JAVASCRIPT | dict.fromkeys(TOOLCHAINS, f"{__name__}.toolchains"),
    tests_need=("c", "cpp", "node", "wasm", *required()),
)
