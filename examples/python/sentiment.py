"""Whether texts are friendly, by counting words. A function with type hints is a model: see docs/python.md.

millstream push sentiment examples/python/sentiment.py
millstream predict sentiment --text 'what a lovely day'
"""

from typing import NamedTuple

FRIENDLY = {"good", "great", "happy", "lovely", "nice", "thanks"}
UNFRIENDLY = {"awful", "bad", "broken", "sad", "slow", "terrible"}


class Sentiment(NamedTuple):
    """The answer: two outputs."""

    label: str
    score: float


def predict(text: str) -> Sentiment:
    """Return the label of a text, and how certain it is."""
    words = text.lower().split()
    friendly, unfriendly = (sum(word in known for word in words) for known in (FRIENDLY, UNFRIENDLY))
    score = (1 + friendly) / (2 + friendly + unfriendly)
    return Sentiment("positive", score) if score >= 0.5 else Sentiment("negative", 1 - score)
