"""Known limits of a runtime, reported before a graph is tried."""

from __future__ import annotations

from collections.abc import Iterable

from attn_export.results import GraphFile
from attn_export.runtimes.protocol import Runtime


def known_limit(kind: Runtime, form: GraphFile, others: Iterable[GraphFile] = ()) -> str:
    """Return the reason not to run a graph in a runtime, with the forms that fit; or "".

    Args:
        kind: The runtime.
        form: The graph.
        others: Further forms of the same graph.
    """
    reason = _reason(kind, form)
    if not reason:
        return ""
    fitting = dict.fromkeys(o.dialect for o in others if o != form and not _reason(kind, o))
    return reason + (f"; it runs {' and '.join(fitting)}" if fitting else "")


def _reason(kind: Runtime, form: GraphFile) -> str:
    if form.dialect not in kind.dialects:
        return f"it is not for the {form.dialect} dialect"
    for row in kind.unsupported:
        if row.features <= set(form.features):
            named = " with ".join(sorted(row.features))
            return f"{kind.name} {kind.measured} does not do {named}: {row.says}"
    return ""
