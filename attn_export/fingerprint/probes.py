"""Every probe."""

from __future__ import annotations

from attn_export.fingerprint.findings import Probe
from attn_export.fingerprint.mask_probes import masks, odd_inputs
from attn_export.fingerprint.precision import precision
from attn_export.fingerprint.seen_keys import seen_keys


def probes() -> tuple[Probe, ...]:
    """Return all probes, in the order of the report."""
    return (*seen_keys(), *masks(), *precision(), *odd_inputs())
