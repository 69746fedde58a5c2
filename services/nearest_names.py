"""The known names that resemble an unknown one, for error messages. Pure; bounded at thousands of names.

name ─> pairs of letters in common (one `&` for each known name) ─> the best few ─> difflib ─> "; did you mean 'a'?"
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import islice, pairwise

#: known names beyond these are not looked at: at 10,000 names a search takes about 2 ms
NAMES_MAX = 10_000
#: longer names are cut before they are compared
CHARACTERS_MAX = 128
SHOWN_MAX = 3
KEYS_MAX = 40
_COMPARED_MAX = 16  # names that difflib compares, at about 20 us each
_RATIO_MIN = 0.6  # as difflib.get_close_matches
_PREFIX_CHARACTERS_MIN = 3
_MASK_BITS = 256


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return at most SHOWN_MAX of the known names that resemble `name`, the nearest first.

    Case, and the characters "-", "_", "." and " ", do not count.
    """
    wanted = _folded(name[:CHARACTERS_MAX])
    mask = _letter_pairs(name[:CHARACTERS_MAX])
    scored = [
        (2 * (mask & pairs).bit_count() - pairs.bit_count(), other)
        for other in islice(known, NAMES_MAX)
        if (pairs := _letter_pairs(other[:CHARACTERS_MAX])) and other != name
    ]
    matcher = SequenceMatcher(b=wanted, autojunk=False)
    ranked: list[tuple[float, str]] = []
    for _, other in heapq.nlargest(_COMPARED_MAX, scored):
        ratio = _ratio(matcher, wanted, _folded(other[:CHARACTERS_MAX]))
        if ratio >= _RATIO_MIN:
            ranked.append((-ratio, other))
    return [other for _, other in sorted(ranked)[:SHOWN_MAX]]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'a' or 'b'?" for the end of a message; "" if no known name resembles `name`."""
    question = _question(nearest(name, known))
    return f"; {question}" if question else ""


def unknown_key(key: str, known: Iterable[str], what: str = "field") -> str:
    """Return what to say about an unknown key, which is called `what`: the nearest valid keys, then KEYS_MAX of all."""
    keys = list(known)
    near = nearest(key, keys)
    valid = [*near, *(other for other in keys if other not in near)]
    more = f", and {len(valid) - KEYS_MAX} more" if len(valid) > KEYS_MAX else ""
    question = f"{_question(near)} " if near else ""
    return f"there is no {what} '{key[:CHARACTERS_MAX]}': {question}valid: {', '.join(valid[:KEYS_MAX])}{more}"


def _question(names: list[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return f"did you mean {' or '.join(quoted)}?" if names else ""


def _ratio(matcher: SequenceMatcher[str], wanted: str, other: str) -> float:
    """Return how similar two folded names are, 0 to 1. A name that starts with the other is similar in any case."""
    matcher.set_seq1(other)
    ratio = matcher.ratio()
    short, long = sorted((wanted, other), key=len)
    if len(short) >= _PREFIX_CHARACTERS_MIN and long.startswith(short):
        return max(ratio, _RATIO_MIN)
    return ratio


@lru_cache(maxsize=2 * NAMES_MAX)
def _letter_pairs(name: str) -> int:
    """Return a set of bits, one for each pair of neighbouring characters of the folded name and for its ends."""
    text = f"^{_folded(name)}$"
    bits = 0
    for first, second in pairwise(text):
        bits |= 1 << ((ord(first) * 31 + ord(second)) % _MASK_BITS)
    return bits


def _folded(name: str) -> str:
    return name.casefold().translate(_IGNORED)


_IGNORED = str.maketrans("", "", "-_. ")
