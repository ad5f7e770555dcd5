"""Sweeps: many specs, dialects and runtimes on a Dask cluster, with one store of results."""
