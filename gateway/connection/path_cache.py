"""path_cache: the model and version that the URL of an infer post names. Pure."""

from __future__ import annotations

import re
from urllib.parse import unquote

from httptools import parse_url

InferPath = tuple[str, str | None]
"""(model, version); version None: the URL names none."""

PATHS_MAX = 4096  # cached URLs of one server; a full cache is emptied
URL_BYTES_MAX = 512  # longer URLs are never cached, which bounds the cache in bytes, too
_PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")


def infer_path(url: bytes) -> InferPath | None:
    """Return (model, version) of the URL of an infer post, percent-decoded; None for any other URL.

    None, too, for a path with an encoded slash, which the ASGI app refuses.
    """
    try:
        raw_path = parse_url(url).path
        path = unquote(raw_path.decode("ascii"))
    except Exception:
        return None  # uvicorn reports the error
    if has_encoded_slash(raw_path):
        return None
    match = _PATH.fullmatch(path)
    return None if match is None else (match[1], match[2])


def has_encoded_slash(raw_path: bytes) -> bool:
    """Whether a path, as sent, has a slash that separates for those who decode it, and not for those who do not."""
    return b"%2f" in raw_path.lower()


class PathCache(dict[bytes, InferPath | None]):
    """Returns `infer_path` of a URL, and keeps it, since clients repeat their URLs.

    Args:
        routed: a path that the ASGI app answers, although it is one of infer posts; None: there is none.
    """

    def __init__(self, routed: str | None = None) -> None:
        super().__init__()
        self._routed = None if routed is None else infer_path(routed.encode())

    def __missing__(self, url: bytes) -> InferPath | None:
        path = infer_path(url)
        if path == self._routed:
            path = None
        if len(url) <= URL_BYTES_MAX:
            if len(self) >= PATHS_MAX:
                self.clear()
            self[url] = path
        return path
