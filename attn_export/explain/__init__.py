"""Diagnosis: the reasons that numbers differ, and how a runtime interprets attention."""
