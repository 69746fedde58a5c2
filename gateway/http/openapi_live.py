"""openapi_live: the OpenAPI document of this gateway, with examples for a model that it serves now.

snapshot ─> the versions that answer ─> examples ─> document with examples ─> JSON, kept until the examples change
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import orjson

from millstream.gateway.catalog.snapshot import Snapshot
from millstream.gateway.http.openapi_document import Document
from millstream.gateway.http.openapi_examples import Examples, choose, with_examples
from millstream.services.model.manifest import Manifest
from millstream.services.settings import Settings

#: models that are looked at for an example: thousands would take milliseconds
CANDIDATES_MAX = 200


def answering_versions(snapshot: Snapshot) -> list[Manifest]:
    """Return the versions that answer requests without a version, by name.

    At most CANDIDATES_MAX are returned.
    """
    ready = (
        view.versions[view.serving].manifest
        for _, view in sorted(snapshot.models.items())
        if view.serving is not None and view.serving in view.versions and view.versions[view.serving].available
    )
    return list(itertools.islice(ready, CANDIDATES_MAX))


class LiveDocument:
    """Makes the document, and keeps the last one. Its methods block: call them in a thread.

    Args:
        base: returns the document without examples.
    """

    def __init__(self, base: Callable[[], Document]) -> None:
        self._base = base
        self._lock = threading.Lock()
        self._examples: Examples | None = None
        self._text = b""

    def text(self, snapshot: Snapshot, settings: Settings) -> bytes:
        """Return the document as JSON."""
        versions = answering_versions(snapshot)
        examples = choose(versions, name_target=len(versions) > 1 and not settings.sagemaker_model)
        with self._lock:
            if examples != self._examples:
                self._text = orjson.dumps(with_examples(self._base(), examples))
                self._examples = examples
            return self._text
