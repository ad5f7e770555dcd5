"""The jobs, each of which reads top to bottom as what it does: build, verify, check."""
