"""Truth, eager, and the rule by which a runtime passes."""
