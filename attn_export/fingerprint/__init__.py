"""What a runtime means by attention: probes, the readings that they tell apart, who is asked."""
