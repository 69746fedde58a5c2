"""What an installation is called, in Redis and in shared memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError

from millstream.services.errors import Code, Failure
from millstream.services.installation import FILE, installation_name, shm_prefix
from millstream.services.settings import Settings


def test_two_homes_have_two_names_that_stay(tmp_path: Path) -> None:
    one, other = Settings(home=tmp_path / "one"), Settings(home=tmp_path / "other")
    assert installation_name(one) != installation_name(other)
    assert installation_name(one) == installation_name(Settings(home=tmp_path / "x" / ".." / "one"))
    assert installation_name(Settings(home=tmp_path / "third", installation_name="mine")) == "mine"
    assert not (tmp_path / "third").exists()


def test_homes_that_share_a_repository_have_one_name_but_memory_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    homes = [tmp_path / name for name in ("one", "other")]
    for home in homes:
        home.mkdir()
        (home / "repository").symlink_to(tmp_path / "models")
    one, other = (Settings(home=home) for home in homes)
    assert installation_name(one) == installation_name(other)
    assert shm_prefix(one) != shm_prefix(other)
    assert shm_prefix(one).startswith(f"{installation_name(one)}-")


def test_processes_that_start_together_agree_on_a_new_name(tmp_path: Path) -> None:
    for attempt in range(20):
        settings = Settings(home=tmp_path / str(attempt))
        with ThreadPoolExecutor(8) as threads:
            names = set(threads.map(lambda _, settings=settings: installation_name(settings), range(8)))
        assert len(names) == 1
        assert [path.name for path in settings.repository_dir.iterdir()] == [FILE]


@pytest.mark.parametrize("content", [b"", b"a b\n", b"{x}\n", b"\xff\n", b"a" * 65, b"../x"])
def test_a_file_that_holds_no_name_is_said_to(tmp_path: Path, content: bytes) -> None:
    settings = Settings(home=tmp_path)
    settings.repository_dir.mkdir()
    (settings.repository_dir / FILE).write_bytes(content)
    with pytest.raises(Failure, match="MILLSTREAM_INSTALLATION_NAME") as failure:
        installation_name(settings)
    assert failure.value.code is Code.INTERNAL


@pytest.mark.parametrize("name", ["", "a:b", "{a}", "a/b", "-a", "a.b", "a*", "a\n", "a" * 65])
def test_a_name_that_could_be_part_of_another_key_or_file_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="installation_name"):
        Settings(installation_name=name)
