"""The folders with the sources of programs in other languages."""

from pathlib import Path

KITS = Path(__file__).with_name("sources")
"""The sources of kits, by language, and those that several languages share."""

HARNESS = Path(__file__).with_name("harness")
"""The sources of the programs behind runtimes, which use those of kits."""
