"""Runtimes that are Python packages: each file is named as its runtime, with _ for -.

It holds the class, `RUNTIME`, which imports the SDK in methods only.
"""

from attn_export.optional_parts import runtimes_in

ENGINES = runtimes_in(__name__, __file__)
"""The module of each runtime. It is imported when its runtime is first used: importing all of them
takes a tenth of the time of `verify`."""
