"""Projects in other languages, as templates, and their values."""
