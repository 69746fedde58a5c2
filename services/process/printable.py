"""Makes untrusted text safe for a terminal. Pure."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return `text` with control characters (\x1b, line ends, direction marks) written as escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
