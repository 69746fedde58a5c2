"""Reads the setting that names the origins whose web pages may call. Pure."""

from __future__ import annotations

import re

ANY = "*"
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")


def parse_origins(text: str) -> list[str]:
    """Return the origins in `text`, which separates them by commas. Raises ValueError for text that is no origin."""
    origins = [part.strip().lower() for part in text.split(",") if part.strip()]
    for origin in origins:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"'{origin[:64]}' is no origin: write https://HOST or https://HOST:PORT, no path, or *")
    if ANY in origins and len(origins) > 1:
        raise ValueError("* stands for all origins: give it alone")
    return origins
