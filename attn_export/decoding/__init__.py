"""Decoding with a bundle: prompt and steps, numpy in and out."""
