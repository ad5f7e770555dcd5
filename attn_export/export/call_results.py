"""What a call of a module gives, as named tensors: what it returns, and what it changes.

A cache that is updated in place is an argument that the call changes. Its tensors are inputs
``past_key_0`` and outputs ``present_key_0``; so are those of an object that a call takes and
returns anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from attn_export.errors import UsageError, counted
from attn_export.export.nested import RETURNED, InputTree, Leaves, Results, children_of

PAST, PRESENT = "past_", "present_"


def find_results(
    call: Callable[[Mapping[str, Any]], Any], tree: InputTree, names: Sequence[str]
) -> tuple[InputTree, Results]:
    """Return the arguments with their names, and the outputs of a module, by one call of it.

    `call`: Calls the module with arguments by name.
    `names`: The names for what is returned, see `_name_returned`.
    """
    arguments = tree.rebuild({name: tensor.clone() for name, tensor in tree.tensors.items()})
    before = Leaves.of(arguments)
    returned = call(arguments)
    after = Leaves.of(arguments)
    own = Leaves.of({RETURNED: returned}, without=after.containers)
    changed = [
        p
        for p, x in after.tensors().items()
        if not _is_same(x, before.leaves.get(p), tree.tensors.get(p))
    ]
    taken_over = _returned_anew(before, own)
    owners = {owner for place in changed if (owner := after.owner(place))}
    owners |= {before.owner(place) for place in taken_over.values()}
    inside = [p for p in {**before.tensors(), **after.tensors()} if after.owner(p) in owners]
    stems = _stems(inside) | {p: p.removeprefix(PAST) for p in changed if not after.owner(p)}
    inputs = {
        place: (PAST + stems[place] if place in inside else place)
        for place, tensor in tree.tensors.items()
        # A number that stays is a constant, such as the length of a window.
        if tensor.dim() or place in changed or not before.owner(place)
    }
    in_place = [p for p in changed if p in inputs and after.leaves[p] is before.leaves[p]]
    follows = {p: p for p in changed} | taken_over
    try:
        outputs = _name_returned(
            returned,
            own,
            names,
            {p: PRESENT + stems[of] for p, of in taken_over.items()},
            {PRESENT + stems[place]: place for place in changed},
        )
    except UsageError as error:
        return tree, Results(names, problem=error)
    # What is returned in the place of an argument has its name.
    again = {name: place for name, place in outputs.items() if name in inputs}
    outputs = {
        PRESENT + name.removeprefix(PAST) if name in again else name: place
        for name, place in outputs.items()
    }
    by_place = {place: name for name, place in outputs.items()}
    follows |= {place: name for name, place in again.items()}
    states = {
        by_place[p]: inputs[of]
        for p, of in follows.items()
        if p in by_place
        and of in inputs
        and _is_alike({**after.leaves, **own.leaves}[p], before.leaves[of])
    }
    numbers = [p for p, x in before.leaves.items() if type(x) is int and after.leaves.get(p) != x]
    plain = {inputs[p]: by_place[p] for p in in_place if not after.owner(p)}
    return tree.renamed(inputs, in_place), Results(names, outputs, states, plain, numbers)


def _is_alike(new: Tensor, old: Tensor) -> bool:
    """Return whether the next call may take a tensor in the place of another."""
    return (new.dtype, new.dim()) == (old.dtype, old.dim())


def _is_same(found: Tensor, given: Any, value: Tensor | None) -> bool:
    """Return whether a tensor is the one that was given, with the values that it had."""
    if found is not given or value is None or found.shape != value.shape:
        return False
    return bool(((found == value) | ((found != found) & (value != value))).all())


def _returned_anew(before: Leaves, own: Leaves) -> dict[str, str]:
    """Return the place of the same tensor in an argument, by place in a returned object.

    The returned object is a new one of the class of the argument.
    """
    found: dict[str, str] = {}
    free = {p: x for p, x in before.objects.items() if before.owner(p) == ""}
    for place, value in own.objects.items():
        if own.owner(place):
            continue
        source = next((p for p, x in free.items() if type(x) is type(value)), None)
        if source is None:
            continue
        del free[source]
        for at in own.tensors():
            of = source + at.removeprefix(place)
            if at.startswith(f"{place}.") and isinstance(before.leaves.get(of), Tensor):
                found[at] = of
    return found


# -- names --------------------------------------------------------------------------------------

_NOUNS = {"keys": "key", "values": "value", "k": "key", "v": "value"}


def _stems(places: Iterable[str]) -> dict[str, str]:
    """Return names such as ``key_0`` for ``cache.layers.0.keys``, as short as they may be."""
    stems = {place: _stem(place) for place in places}
    for stem, count in Counter(stems.values()).items():
        if count > 1:
            alike = [place for place, name in stems.items() if name == stem]
            words = [[w for w in place.split(".") if not w.isdigit()] for place in alike]
            at = next(
                (i for i, step in enumerate(zip(*words, strict=False)) if len(set(step)) > 1), 0
            )
            for place, steps in zip(alike, words, strict=True):
                stems[place] = f"{steps[at].partition('_')[0]}_{stem}"
    again = {name for name, count in Counter(stems.values()).items() if count > 1}
    return {p: p.replace(".", "_") if name in again else name for p, name in stems.items()}


def _stem(place: str) -> str:
    steps = place.split(".")
    last = next(s for s in reversed(steps) if not s.isdigit())
    noun = last.strip("_").removesuffix("_cache").removeprefix(PAST)
    return "_".join([_NOUNS.get(noun, noun), *(s for s in steps if s.isdigit())])


def _name_returned(
    returned: Any,
    own: Leaves,
    names: Sequence[str],
    anew: Mapping[str, str],
    states: Mapping[str, str],
) -> dict[str, str]:
    """Return the places of the outputs of a module, by name.

    Names are those of the tensors that are returned, in order; or the keys of a dict, of which some
    may be left out; or the names of what is returned, with tensors within.

    `own`: What is returned, without arguments.
    `anew`: Names of tensors in returned objects, by place.
    `states`: The places of the tensors that the call changes, by name. They follow.
    """
    leaves = [
        p
        for p, x in own.leaves.items()
        if x is not None and not (own.owner(p) and not isinstance(x, Tensor))
    ]
    for place in leaves:
        if not isinstance(own.leaves[place], Tensor):
            raise UsageError(
                f"the module returns {type(own.leaves[place]).__name__} in "
                f"{type(returned).__name__}; it must return a tensor, or tuples, lists, dicts or "
                "objects with tensors"
            )
    items = {str(key): item for key, item in children_of(returned) or () if item is not None}
    if set(names) <= set(items):
        return _within({name: f"{RETURNED}.{name}" for name in names}, leaves, anew) | dict(states)
    if len(leaves) == len(names):
        return dict(zip(names, leaves, strict=True)) | dict(states)
    if len(leaves) + len(states) == len(names):
        return dict(zip(names, [*leaves, *states.values()], strict=True))
    if len(items) == len(names):
        at = [f"{RETURNED}.{key}" for key in items]
        return _within(dict(zip(names, at, strict=True)), leaves, anew) | dict(states)
    if not items and len(names) == 1:
        return _within({names[0]: RETURNED}, leaves, anew) | dict(states)
    more = f" and changes {len(states)} in its arguments" if states else ""
    raise UsageError(
        f"the module returns {counted(len(leaves), 'tensor')}{more}, but outputs names "
        f"{len(names)}: {', '.join(names)}"
    )


def _within(
    places: Mapping[str, str], leaves: Sequence[str], anew: Mapping[str, str]
) -> dict[str, str]:
    """Return the places of the tensors in some places, by name."""
    found: dict[str, str] = {}
    for name, place in places.items():
        for leaf in leaves:
            if leaf == place or leaf.startswith(f"{place}."):
                found[anew.get(leaf, name + leaf.removeprefix(place))] = leaf
    return found
