"""The lock of the repository: changes take turns, and one that a frozen process holds delays a change for a while."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Endpoint
from millstream.services.repository import disk
from millstream.services.repository.endpoint_changes import activate_version
from millstream.services.repository.folder import FolderRepository
from tests.contract.repositories import publish
from tests.kit.stack import sigstopped

CHANGES, CALLERS = 30, 12
HOLDER = """
import sys
from pathlib import Path
from millstream.services.repository.disk import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def repository(tmp_path: Path) -> FolderRepository:
    return FolderRepository(tmp_path / "repository")


@pytest.fixture
def held(tmp_path: Path, repository: FolderRepository) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of the repository."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "repository" / ".lock")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with process:
        yield process
        process.kill()


def test_a_lock_that_a_frozen_process_holds_is_given_up(
    repository: FolderRepository, held: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "LOCK_S_MAX", 0.2)
    with sigstopped(held.pid), pytest.raises(Failure, match="if it is frozen, end it") as refused:
        publish(repository)
    assert refused.value.code is Code.UNAVAILABLE
    assert refused.value.retry_after_s
    assert list(repository.models()) == []
    held.kill()  # the kernel releases its lock
    held.wait()
    publish(repository)
    assert [*repository.versions("digits")] == [1]


def test_a_change_waits_for_one_that_ends(repository: FolderRepository, held: subprocess.Popen[str]) -> None:
    with ThreadPoolExecutor(1) as pool:
        change = pool.submit(publish, repository)
        assert held.stdin is not None
        held.stdin.close()
        change.result()
    assert [*repository.versions("digits")] == [1]


def test_many_changes_take_turns(repository: FolderRepository) -> None:
    for version in range(1, CHANGES + 1):
        publish(repository, version=version)

    def change(caller: int) -> None:
        for version in range(1, CHANGES + 1):
            activate_version(repository, "digits", (version + caller) % CHANGES + 1)

    with ThreadPoolExecutor(CALLERS) as pool:
        for one in [pool.submit(change, caller) for caller in range(CALLERS)]:
            one.result()
    assert repository.endpoint("digits") != Endpoint(model="digits")
