"""The API keys of a repository: documents that hold no secret.

<root>/keys/<id>.json   KeyDocument, replaced under <root>/keys/.lock
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from millstream.services.access.document import KeyDocument
from millstream.services.access.secret import is_id
from millstream.services.errors import Code, Failure, not_found
from millstream.services.repository.disk import fsync, locked, read_file, replace_file, storage_errors

log = logging.getLogger("millstream.access")

KEYS_MAX = 1000  # documents, revoked ones included
DOCUMENT_BYTES_MAX = 64 << 10
#: A younger file may change again without a new modification time.
_SETTLED_NS = 2_000_000_000
#: errors that say something of one document; any other, such as too many open files, may end, and leaves all keys as
#: they are known
_OF_ONE_DOCUMENT = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.EISDIR, errno.ELOOP})


class StoredKeys(NamedTuple):
    """All keys. `damaged`: ids of documents that cannot be read; such keys are refused."""

    documents: tuple[KeyDocument, ...] = ()
    damaged: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        """Whether there is a document, also one that cannot be read."""
        return bool(self.documents or self.damaged)


class AccessKeys:
    """The keys of a repository, whose folder is `root`. Safe for several threads and processes."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "keys"
        self._damaged: dict[Path, tuple[int, int]] = {}  # documents of which the log says so -> their stamps
        self._found = False  # whether the folder was there

    def stamp(self) -> tuple[int, ...] | None:
        """Return a value that changes when a key changes; None: a change may be too recent to show.

        Raises Failure as `read` does.
        """
        with storage_errors(self._folder):
            stamps = sorted(_stamp(path) for path in (*self._paths(), *([self._folder] if self._found else ())))
        if any(abs(time.time_ns() - changed_ns) < _SETTLED_NS for changed_ns, _, _ in stamps):
            return None
        return tuple(value for one in stamps for value in one)

    def read(self) -> StoredKeys:
        """Return all keys, ordered by creation.

        Raises Failure when the folder cannot be read, or is no longer there: without keys, all calls would be let in.
        """
        documents: list[KeyDocument] = []
        damaged: list[str] = []
        with storage_errors(self._folder):
            for path in self._paths():
                document = self._document(path)
                if document is None:
                    damaged.append(path.stem)
                else:
                    documents.append(document)
        documents.sort(key=lambda document: (document.created_at, document.id))
        return StoredKeys(tuple(documents), tuple(damaged))

    def _paths(self) -> list[Path]:
        # Not Path.glob: it returns nothing for a folder that cannot be read.
        try:
            paths = sorted(self._folder.iterdir())
        except FileNotFoundError:
            if self._found:
                raise Failure(Code.INTERNAL, f"{self._folder} is no longer there") from None
            return []
        self._found = True
        return [path for path in paths if path.suffix == ".json"]

    def add(self, document: KeyDocument, now: float) -> None:
        """Store a new key. Raises Failure(CONFLICT) if a live key has its name, or there are too many keys."""
        with storage_errors(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self._folder / ".lock"):
                stored = self.read()
                if any(one.name == document.name and not one.ended(now) for one in stored.documents):
                    raise Failure(Code.CONFLICT, f"there is a key '{document.name}': rotate it, or choose another name")
                if len(stored.documents) + len(stored.damaged) >= KEYS_MAX:
                    raise Failure(Code.CONFLICT, f"there are {KEYS_MAX} keys: forget revoked ones")
                replace_file(self._path(document.id), _content(document))

    def change(self, name: str, change: Callable[[KeyDocument], KeyDocument]) -> KeyDocument:
        """Replace a key, by its id or name (the newest of a name), by the result of `change`, and return it.

        Raises Failure: NOT_FOUND; or what `change` raises.
        """
        with storage_errors(self._folder), self._locked(name):
            document = self.find(name)
            changed = change(document)
            if changed != document:
                replace_file(self._path(changed.id), _content(changed))
            return changed

    def forget(self, name: str, now: float) -> KeyDocument | None:
        """Remove the document of a key that has ended, and return it; None: it was damaged, and `name` is its id.

        Raises Failure: NOT_FOUND, CONFLICT (the key is live).
        """
        with storage_errors(self._folder), self._locked(name):
            if name in self.read().damaged:
                (self._folder / f"{name}.json").unlink()
                fsync(self._folder)
                return None
            document = self.find(name)
            if document.ended(now) is None:
                raise Failure(Code.CONFLICT, f"key '{document.name}' is live: revoke it first")
            self._path(document.id).unlink(missing_ok=True)
            fsync(self._folder)
            return document

    def find(self, name: str) -> KeyDocument:
        """Return a key by id or name; of a name the newest key. Raises Failure(NOT_FOUND)."""
        wanted, documents = name.removeprefix("mr_"), self.read().documents[::-1]
        for document in documents:  # first by id: a key may have the id of another key as its name
            if document.id == wanted:
                return document
        for document in documents:
            if document.name == name:
                return document
        raise not_found(f"there is no key '{name[:80]}'")

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        if not self._folder.is_dir():
            raise not_found(f"there is no key '{name[:80]}'")
        with locked(self._folder / ".lock"):
            yield

    def _path(self, key_id: str) -> Path:
        assert is_id(key_id)
        return self._folder / f"{key_id}.json"

    def _document(self, path: Path) -> KeyDocument | None:
        stamp = (0, 0)
        try:
            about = path.stat()
            stamp = (about.st_mtime_ns, about.st_size)
            document = KeyDocument.model_validate_json(read_file(path, DOCUMENT_BYTES_MAX))
            if document.id != path.stem:
                raise ValueError("it is of another key")
            return document
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in _OF_ONE_DOCUMENT:
                raise
            if self._damaged.get(path) != stamp:
                self._damaged[path] = stamp
                why = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
                log.warning("%s is damaged, and its key is refused: %s", path, why)
            return None


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        about = path.stat()
    except OSError:  # removed meanwhile, which the folder's own stamp shows; or damaged
        return (0, 0, 0)
    return (about.st_mtime_ns, about.st_ino, about.st_size)


def _content(document: KeyDocument) -> bytes:
    # Without what is unset: an earlier release refuses a limit that it does not know.
    return document.model_dump_json(indent=1, exclude_none=True).encode() + b"\n"
