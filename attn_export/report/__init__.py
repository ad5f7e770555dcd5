"""Output of reports, for people and machines."""
