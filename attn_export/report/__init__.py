"""What a person or a machine gets to read."""
