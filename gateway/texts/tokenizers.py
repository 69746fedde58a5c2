"""tokenizers: reads the tokenizer.json that came with a version once, and keeps those of the versions used last.

The library is imported with the first text, so that gateways that serve no texts need not have it.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.texts.text_plans import TOKENIZER
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.manifest import Manifest
from millstream.services.model.version_files import read_inside
from millstream.services.repository.base import Repository

FILE_BYTES_MAX = 64 << 20
KEPT_MAX = 8


class Tokenizers:
    """Tokenizes texts. Its methods block: call them in a thread.

    Args:
        repository: with the files of versions.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._changing = threading.Lock()

    def encode(self, manifest: Manifest, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text.

        Raises Failure: INVALID, the version has no tokenizer or a broken one; UNSUPPORTED, the library is not
        installed.
        """
        tokenizer = self._of(manifest)
        try:
            return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
        except BaseException as error:  # the library is in Rust: a panic is not an Exception
            raise invalid(f"the text cannot be tokenized: {error}") from None

    def _of(self, manifest: Manifest) -> Any:
        with self._changing:
            tokenizer = self._kept.get(manifest.content_id)
        if tokenizer is None:
            tokenizer = self._load(manifest)  # without the lock, since loading may take long
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
            tokenizer.no_padding()  # token_inputs pads to the longest text of a run
        except BaseException as error:  # as above: a panic is not an Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise invalid(f"the {TOKENIZER} of model '{manifest.model}' cannot be read: {error}") from None
        return tokenizer

    def _content(self, manifest: Manifest) -> bytes:
        """Read the file: beside the model, in the uploaded archive, or in the version's folder. Raises Failure."""
        folder = self._repository.local_path(manifest.model, manifest.version)
        for place in (PurePosixPath(manifest.served).parent, PurePosixPath("source"), PurePosixPath()):
            path = str(place / TOKENIZER)
            if os.path.lexists(folder / path):
                return read_inside(folder, path, FILE_BYTES_MAX, f"the tokenizer of model '{manifest.model}':")
        raise invalid(
            f"model '{excerpt(manifest.model)}' has no tokenizer: send token ids, or upload the model in a zip or tar "
            f"with its {TOKENIZER}"
        )
