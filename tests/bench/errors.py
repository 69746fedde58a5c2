"""The error of a measurement that cannot be made."""

from __future__ import annotations


class LoadError(Exception):
    """A measurement failed; the message is one line."""
