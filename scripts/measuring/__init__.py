"""Modules of the scripts that measure: phases, candidates, pages of results."""
