"""Optional parts of the package: each folder here is one, and may be removed.

A part imports the core. The core imports no part: `optional_parts` reads `PART` of each folder that
is there, and imports a module of a part when it is used.
"""
