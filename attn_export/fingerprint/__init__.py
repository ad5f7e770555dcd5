"""Meaning of attention in a runtime: probes, the readings that they separate, the queries."""
