"""The float64 truth of a case, and the error that rounding allows."""
