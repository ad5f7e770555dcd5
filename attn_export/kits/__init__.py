"""Projects in other languages, as templates, and what is put into them."""
