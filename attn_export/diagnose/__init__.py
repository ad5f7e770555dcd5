"""Diagnosis: the reasons that numbers differ, and what the attention of a runtime means."""
