"""More runtimes that are Python packages: each file is one, as in `runtimes/engines/`."""

from attn_export.optional_parts import Part, runtimes_in

PART = Part(runtimes=runtimes_in(__name__, __file__))
