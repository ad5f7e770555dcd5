"""Test inputs: shapes, semantic probes, and their golden vectors on disk."""
