"""Building whole models: capture, cases and rewrites of their graphs."""
