"""Signatures of bundles, and statements about them in the formats of in-toto and CycloneDX."""
