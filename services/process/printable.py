"""Text that a stranger chose, made fit for a terminal. Pure."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""`text` with everything that a terminal would obey (\x1b, line ends, marks of direction) written as an escape."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
