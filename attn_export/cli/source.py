"""Input of `build`: a spec, dimensions, a checkpoint, or a module of the user's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.errors import UsageError
from attn_export.report.progress import Progress
from attn_export.spec import AttentionSpec

if TYPE_CHECKING:
    from attn_export.subject import Subject

Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Source:
    """Origin of the subject; the options of `build` by their names."""

    spec_file: Path | None
    variant: str | None
    module: str | None
    weights: Path | None
    layer: str | None
    pool_kv_heads: int | None

    @property
    def name(self) -> str:
        """The name of the bundle."""
        if self.module:
            return self.module.rpartition(":")[2]
        if self.spec_file:
            return self.spec_file.stem
        if self.weights:
            path = self.weights.absolute()
            # Most checkpoints are called model.safetensors; their folder says which model.
            return path.parent.name if path.name.startswith("model") else path.name.split(".")[0]
        return self.variant or "attention"

    def check(self, changes: Fields) -> None:
        """Refuse options that contradict each other.

        Raises:
            UsageError: If so, or if there is nothing to build.
        """
        given = [str(source) for source in (self.spec_file, self.variant, self.module) if source]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} are given; choose one")
        if self.module and (changes or self.weights):
            names = [*changes, *(["weights"] if self.weights else [])]
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            raise UsageError(
                f"{flags} with --module {self.module}, which brings its own; leave it out"
            )
        for flag, value in (("--layer", self.layer), ("--pool-kv-heads", self.pool_kv_heads)):
            if value is not None and not self.weights:
                raise UsageError(f"{flag} {value} without --weights; name the checkpoint")
        if not (given or changes or self.weights):
            raise UsageError(
                "nothing to build; give SPEC.toml, --variant mha|mqa|gqa, --weights FILE or "
                "--module PATH.py:FUNCTION"
            )

    def read(self, changes: Fields, progress: Progress) -> AttentionSpec | Subject:
        """Read the spec, checkpoint or module.

        Args:
            changes: Single fields of the spec.
            progress: Receiver of progress.

        Raises:
            AttnExportError: If it cannot be read, or contradicts its description.
        """
        if self.module:
            progress.phase("importing torch")
            from attn_export.user_module import load_subject

            return load_subject(self.module)
        spec = self._spec(changes)
        if self.weights is None:
            return spec or AttentionSpec.from_dict(changes)
        progress.phase("reading the checkpoint")
        from attn_export.subject import Subject

        return Subject.from_checkpoint(
            self.weights,
            layer=self.layer,
            spec=spec,
            pool_kv_heads=self.pool_kv_heads,
            **({} if spec else changes),
        )

    def _spec(self, changes: Fields) -> AttentionSpec | None:
        """Return the given spec; None if only dimensions are given or the weights define it."""
        if self.spec_file:
            return AttentionSpec.from_toml(self.spec_file, **changes)
        if self.variant:
            return AttentionSpec.variant(self.variant, **changes)
        # Both are needed for a spec; without them they are changes to what config.json says.
        if self.weights and {"embed_dim", "num_heads"} <= changes.keys():
            return AttentionSpec.from_dict(changes)
        return None
