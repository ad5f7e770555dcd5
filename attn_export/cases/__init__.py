"""Test cases: sizes and contents that together show every known fault."""
