"""Files of a bundle: manifest, golden vectors, quality."""
