"""tokenizers: the tokenizer.json that came with a version, read once and kept for the versions used last.

The library is loaded when the first text comes: who serves no text need not have it.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from millstream.gateway.protocols.openai.request import unknown_words
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.manifest import Manifest
from millstream.services.model.version_files import read_inside
from millstream.services.repository.base import Repository

FILE = "tokenizer.json"
FILE_BYTES_MAX = 64 << 20
KEPT_MAX = 8


class Tokenizers:
    """Blocking: call in a thread."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._changing = threading.Lock()

    def encode(self, manifest: Manifest, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text. Raises Failure(INVALID): the version has no tokenizer, or a broken one.

        Raises Failure(UNSUPPORTED): the library is not installed.
        """
        tokenizer = self._of(manifest)
        try:
            return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
        except BaseException as error:  # a panic of the library is no Exception
            raise invalid(f"the text cannot be tokenized: {error}") from None

    def _of(self, manifest: Manifest) -> Any:
        with self._changing:
            tokenizer = self._kept.get(manifest.content_id)
        if tokenizer is None:
            tokenizer = self._load(manifest)  # without the lock: it may take long, and others need not wait for it
        with self._changing:
            self._kept[manifest.content_id] = tokenizer
            self._kept.move_to_end(manifest.content_id)
            while len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        return tokenizer

    def _load(self, manifest: Manifest) -> Any:
        content = self._content(manifest)
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            raise Failure(
                Code.UNSUPPORTED,
                "this server takes no text: pip install 'millstream[embeddings]', or send token ids",
            ) from None

        try:
            tokenizer = Tokenizer.from_buffer(content)
            tokenizer.no_padding()  # it is padded here, to the longest entry of a run
        except BaseException as error:  # the library is no Python: what it trips over may be no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise invalid(f"the {FILE} of model '{manifest.model}' cannot be read: {error}") from None
        return tokenizer

    def _content(self, manifest: Manifest) -> bytes:
        """The file beside the model, as it was uploaded, or in the version's folder. Raises Failure(INVALID)."""
        folder = self._repository.local_path(manifest.model, manifest.version)
        for place in (PurePosixPath(manifest.served).parent, PurePosixPath("source"), PurePosixPath()):
            path = str(place / FILE)
            if os.path.lexists(folder / path):
                return read_inside(folder, path, FILE_BYTES_MAX, f"the tokenizer of model '{manifest.model}':")
        raise invalid(unknown_words(manifest.model))
