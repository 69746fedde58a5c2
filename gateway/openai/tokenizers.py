"""tokenizers: the tokenizer.json that came with a version, read once and kept for the versions used last.

The library is loaded when the first text comes: who serves no text need not have it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.openai.request import unknown_words
from services.errors import invalid
from services.manifest import Manifest
from services.repository.base import Repository

FILE = "tokenizer.json"
FILE_BYTES_MAX = 64 << 20
KEPT_MAX = 8


class Tokenizers:
    """Blocking: call in a thread."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._loading = threading.Lock()

    def encode(self, manifest: Manifest, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text. Raises Failure(INVALID): the version has no tokenizer, or a broken one."""
        tokenizer = self._of(manifest)
        try:
            return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
        except Exception as error:
            raise invalid(f"the text cannot be tokenized: {error}") from None

    def _of(self, manifest: Manifest) -> Any:
        with self._loading:
            tokenizer = self._kept.get(manifest.release)
            if tokenizer is None:
                tokenizer = self._kept[manifest.release] = self._load(manifest)
            self._kept.move_to_end(manifest.release)
            while len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
            return tokenizer

    def _load(self, manifest: Manifest) -> Any:
        path = self._path(manifest)
        if path is None:
            raise invalid(unknown_words(manifest.model))
        from tokenizers import Tokenizer

        if path.stat().st_size > FILE_BYTES_MAX:
            raise invalid(f"the {FILE} of model '{manifest.model}' is larger than {FILE_BYTES_MAX} bytes")
        try:
            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.no_padding()  # it is padded here, to the longest entry of a run
        except BaseException as error:  # the library is no Python: what it trips over may be no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise invalid(f"the {FILE} of model '{manifest.model}' cannot be read: {error}") from None
        return tokenizer

    def _path(self, manifest: Manifest) -> Path | None:
        """Beside the model, as it was uploaded, or in the version's folder."""
        folder = self._repository.local_path(manifest.model, manifest.version)
        places = ((folder / manifest.served).parent / FILE, folder / "source" / FILE, folder / FILE)
        return next((path for path in places if path.is_file()), None)
