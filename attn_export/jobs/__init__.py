"""The jobs, each of which reads from top to bottom as its steps: build, verify, check."""
