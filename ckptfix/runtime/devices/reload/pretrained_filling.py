"""What ``from_pretrained`` made of each tensor of a file: taken, merged, left out, reinitialized, untied, rounded."""

import re
from collections.abc import Mapping
from typing import Any

from accelerate.utils import find_tied_parameters

from ckptfix.runtime.devices.reload.destinations import Destinations, absent_siblings, destinations
from ckptfix.runtime.devices.reload.filling import (
    Filled,
    few,
    holds,
    names_in_words,
    narrowing,
    same_bytes,
    tensors_of,
    untied,
)
from ckptfix.runtime.devices.reload.stored import Weights
from ckptfix.wording import count_of, list_names

_THEN = (
    "; from_pretrained fills the gap with random values, and only warns",
    "; from_pretrained leaves out what has no place, and only warns",
)


def filled_by_loader(model: Any, weights: Weights, info: Mapping[str, Any]) -> Filled:
    """Return what a model got from a file. ``info``: what ``from_pretrained`` says of its loading."""
    state = tensors_of(model)
    found = destinations(model, weights)
    names = {
        ours: theirs
        for ours, theirs in found.names.items()
        if tuple(state[ours].shape) == weights.tensors[theirs].shape
    }
    converted, narrowed = [], []
    for ours, theirs in list(names.items()):
        held, stored = state[ours].dtype, weights.read(theirs).dtype
        if held != stored and holds(held, stored):
            converted.append(ours)
        elif held != stored:
            narrowed.append(narrowing(ours, stored, held))
            del names[ours]
    for place, keys in found.merged.items():
        dtypes = {key: weights.read(key).dtype for key in keys}
        narrowed += [
            narrowing(key, stored, state[place].dtype)
            for key, stored in dtypes.items()
            if not holds(state[place].dtype, stored)
        ]
    differences = [
        *_of_loading(info, found, weights),
        *_of_places(found, weights, info),
        *few(narrowed, "dtype"),
    ]
    return Filled(
        names=names,
        differences=tuple(differences),
        converted=tuple(converted),
        untied=_untied(model, names, weights),
        unproven=tuple(_unproven(model, found, info)),
    )


def _of_loading(info: Mapping[str, Any], found: Destinations, weights: Weights) -> list[str]:
    """Return in words what ``from_pretrained`` says of its loading, each a failure."""
    missing, unexpected = (sorted(info.get(kind, ())) for kind in ("missing_keys", "unexpected_keys"))
    problems = names_in_words(missing, unexpected, weights, then=_THEN)
    mismatched = sorted(info.get("mismatched_keys", ()))
    shapes = [
        f"{name!r} has shape {list(have)} {'merged from' if name in found.merged else 'in'} the file, "
        f"{list(want)} in the model"
        for name, have, want in mismatched
    ]
    if shapes:
        merged = [key for name, *_ in mismatched for key in found.merged.get(name, ())]
        absent = absent_siblings(merged)
        problems += few(shapes, "shape")
        problems.append(
            f"from_pretrained refuses the checkpoint: {count_of(len(shapes), 'tensor')} of another shape than "
            "config.json says (with ignore_mismatched_sizes=True it fills the gap with random values)"
            + (f"; the file has no {list_names(absent)}" if absent else "")
        )
    return problems + [str(message) for message in info.get("error_msgs", ())]


def _of_places(found: Destinations, weights: Weights, info: Mapping[str, Any]) -> list[str]:
    """Return in words which tensors ``from_pretrained`` drops or puts into another's place without a word."""
    crowded = [
        f"{key!r} and {found.names[place]!r} of the file both go to {place!r}: from_pretrained drops one of them, and "
        "says nothing"
        for key, place in found.crowded.items()
        if not same_bytes(weights, key, found.names[place])
    ]
    refused = {name for name, *_ in info.get("mismatched_keys", ())}
    moved = [
        f"the tensors of the file for {place!r} are not numbered from 0 on: from_pretrained closes the gap, so that "
        f"later ones move up, and says nothing; the file has no {list_names(absent_siblings(found.merged[place]))}"
        for place in found.misnumbered()
        if place not in refused
    ]
    return [*few(crowded, "pair"), *few(moved, "place")]


def _untied(model: Any, names: Mapping[str, str], weights: Weights) -> tuple[tuple[str, str], ...]:
    """Return pairs of names that are one tensor by the model's class, and differ in the file.

    transformers 5 leaves them apart and warns, so that the model itself no longer shows the tie.
    """
    tell = getattr(model, "get_expanded_tied_weights_keys", None)
    pairs = dict(tell(all_submodels=True)) if tell is not None else {}
    apart = [
        (names[source], names[target])
        for target, source in pairs.items()
        if source in names and target in names and names[source] != names[target]
    ]
    broken = tuple(pair for pair in apart if not same_bytes(weights, *pair))
    return tuple(dict.fromkeys((*broken, *untied(find_tied_parameters(model), weights))))


def _unproven(model: Any, found: Destinations, info: Mapping[str, Any]) -> list[str]:
    """Return in words which tensors no byte of a tensor of the model, or of the file, can be compared with."""
    said = []
    kind = type(model).__name__
    if found.merged:
        keys = [key for group in found.merged.values() for key in group]
        said.append(
            f"{count_of(len(keys), 'tensor')} of the file ({list_names(keys)}) are merged or cut by the loader "
            f"(into {count_of(len(found.merged), 'place')} of the model): the result is not compared with the file"
        )
    unexpected = set(info.get("unexpected_keys", ()))
    ignored = [key for key, place in found.left_out.items() if not {key, place} & unexpected]
    if ignored:
        said.append(
            f"{count_of(len(ignored), 'tensor')} of the file ({list_names(ignored)}): {kind} has no place for "
            "them, and from_pretrained leaves them out without a warning"
        )
    mismatched = {name for name, *_ in info.get("mismatched_keys", ())}
    unknown = [key for key in found.unknown if not {key} & (unexpected | mismatched)]
    if unknown:
        said.append(
            f"where {count_of(len(unknown), 'tensor')} of the file went ({list_names(unknown)}): this version of "
            "transformers does not say what it renames, merges or leaves out"
        )
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    filled = {*found.names, *found.merged}
    fresh = [
        name
        for name in tensors_of(model)
        if name not in filled and any(re.search(pattern, name) for pattern in patterns)
    ]
    if fresh and not found.unknown:
        said.append(
            f"{count_of(len(fresh), 'tensor')} of the model ({list_names(fresh)}) are not in the file: {kind} may "
            "initialize them, and from_pretrained does not warn"
        )
    return said
