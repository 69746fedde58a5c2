"""What stands in place of a document of the repository, a pipe for example, neither blocks a reader nor is believed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.plugins.compile.stored.job import Job
from millstream.plugins.compile.stored.selection import Selections
from millstream.services.access.access_keys import AccessKeys
from millstream.services.errors import Failure
from millstream.services.repository.disk import read_file
from millstream.services.repository.documents import VersionDocuments, read_document
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.variants import Target, Variants
from tests.contract.repositories import manifest
from tests.kit.versions import publish

ANSWER_S_MAX = 20.0
ONE = manifest("m", 1)


def link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_suffix(".pipe"))
    path.symlink_to(path.with_suffix(".pipe"))


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


THINGS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link to a pipe": link_to_pipe,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "socket": listening,
    "sparse terabyte": large,
}


def place(make: Callable[[Path], object], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)


def race(root: Path, make: Callable[[Path], object]) -> object:
    place(make, root / "races" / "m@1@k@d.json")
    return next(iter(VersionDocuments(root, "races", Job).all()), None)


def choice(root: Path, make: Callable[[Path], object]) -> object:
    selections = Selections(FolderRepository(root))
    place(make, selections._path(ONE, "onnxruntime.cpu", "d"))
    return selections.get(ONE, "onnxruntime.cpu", "d")


def variant(root: Path, make: Callable[[Path], object]) -> object:
    variants, target = Variants(root), Target("openvino-cpu", "1", "d")
    place(make, variants.folder(ONE, target) / "report.json")
    return variants.report(ONE, target) or variants.reports(ONE) or None


def footprint(root: Path, make: Callable[[Path], object]) -> object:
    repository = FolderRepository(root)
    publish(repository, "m", 1)
    stored = repository.manifest("m", 1)
    digest = stored.content_id.rpartition(":")[2]
    place(make, root / "footprints" / "m" / f"1-{digest}.json")
    return repository.footprints.measured(stored, "onnxruntime.cpu")


def key(root: Path, make: Callable[[Path], object]) -> object:
    place(make, root / "keys" / "0123456789abcdef.json")
    return AccessKeys(root).read().documents or None


def endpoint(root: Path, make: Callable[[Path], object]) -> object:
    repository = FolderRepository(root)
    publish(repository, "m", 1)
    place(make, root / "models" / "m" / "endpoint.json")
    with pytest.raises(Failure, match=r"endpoint\.json"):
        repository.endpoint("m")
    return None


def token(root: Path, make: Callable[[Path], object]) -> object:
    repository = FolderRepository(root)
    publish(repository, "m", 1)
    place(make, root / ".token")
    try:
        assert repository.token() != repository.token()
    except Failure as failure:
        assert ".token" in failure.message or "cannot use" in failure.message
    return None


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("reader", [race, choice, variant, footprint, key, endpoint, token])
def test_what_is_no_document_is_not_read_and_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Callable[..., object], thing: str
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    found: list[object] = []
    reading = threading.Thread(target=lambda: found.append(reader(tmp_path, THINGS[thing])), daemon=True)
    reading.start()
    reading.join(ANSWER_S_MAX)
    assert found == [None]


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_file(path, 4)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none", 4)
    assert read_document.__doc__
