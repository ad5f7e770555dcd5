"""Which inputs are tried: shapes, semantic probes, and their golden vectors on disk."""
