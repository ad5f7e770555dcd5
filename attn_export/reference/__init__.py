"""The float64 reference of a case, and its tolerance."""
