"""Faults of whole models: changes of a config, a module or a parameter that explain outputs."""
