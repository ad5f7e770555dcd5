"""ONNX Runtime in C++: a program over its C++ API, that of the kit `cpp`."""

from __future__ import annotations

from attn_export.runtimes.c import C


class Cpp(C):
    """`cpp`."""

    name = "cpp"
