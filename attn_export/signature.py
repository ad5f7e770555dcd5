"""State of a bundle's signature, as reports state it."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Signature:
    """Signature of a bundle.

    Attributes:
        state: ``"not checked"``: it covers every file, and nobody said whose key to trust.
        signer: A key or an identity: genuine if the state is ``"verified"``, else a claim.
    """

    state: Literal["unsigned", "not checked", "verified"]
    signer: str = ""

    def __str__(self) -> str:
        """Return one line."""
        if self.state == "unsigned":
            return "unsigned"
        if self.state == "verified":
            return f"signed by {self.signer}"
        return f"signature not checked ({self.signer}); --trust checks it"
