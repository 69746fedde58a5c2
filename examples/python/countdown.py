"""A function that answers in parts. See docs/streams.md.

millstream push countdown examples/python/countdown.py
millstream predict countdown --stream --text 'lift-off in'
"""

from collections.abc import Iterator


def predict(text: str, start: int = 3) -> Iterator[str]:
    """Yield a text with each number from `start` down to 1."""
    for number in range(start, 0, -1):
        yield f"{text} {number}\n"
