"""path_cache: which model and version the URL of an infer post names. Pure."""

from __future__ import annotations

import re
from urllib.parse import unquote

from httptools import parse_url

InferPath = tuple[str, str | None]

PATHS_MAX = 4096
URL_BYTES_MAX = 512  # longer ones are not remembered: what is kept is bounded in bytes too
_PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")


def infer_path(url: bytes) -> InferPath | None:
    """(model, version) in the path of an infer post, percent-decoded; None for any other URL.

    Decoded first and split then, as the ASGI router does: an encoded slash separates like a plain one.
    """
    try:
        path = unquote(parse_url(url).path.decode("ascii"))
    except Exception:
        return None  # what is wrong with it is for uvicorn to say
    match = _PATH.fullmatch(path)
    return None if match is None else (match[1], match[2])


def learn(paths: dict[bytes, InferPath | None], url: bytes) -> InferPath | None:
    """`infer_path(url)`, remembered in `paths`: clients repeat themselves."""
    path = infer_path(url)
    if len(url) <= URL_BYTES_MAX:
        if len(paths) >= PATHS_MAX:
            paths.clear()
        paths[url] = path
    return path
