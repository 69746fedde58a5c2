"""The token of an installation: one for all gateways, for its owner alone, and sent to no other server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from millstream.client.address import find_server
from millstream.services.local_token import keep_token, read_token, token_file

_KEEP = (
    "from millstream.services.local_token import keep_token; from pathlib import Path; print(keep_token(Path({!r})))"
)


def test_processes_that_start_together_share_one_token(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KEEP.format(str(tmp_path / "home"))]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    found = {process.communicate(timeout=120)[0].strip() for process in started}
    assert found == {read_token(tmp_path / "home")}
    status = token_file(tmp_path / "home").stat()
    assert status.st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "home" / "run").iterdir()] == ["token"]


@pytest.mark.parametrize("spoiled", ["readable", "empty", "text", "a link", "a folder"])
def test_a_file_that_is_no_token_of_ours_is_not_believed(tmp_path: Path, spoiled: str) -> None:
    before = keep_token(tmp_path)
    path = token_file(tmp_path)
    if spoiled == "readable":
        path.chmod(0o640)
    elif spoiled in {"empty", "text"}:
        path.write_text("" if spoiled == "empty" else "Authorization: Bearer mt_\u00e4 b\n")
    else:
        path.unlink()
        path.mkdir() if spoiled == "a folder" else path.symlink_to("/etc/hostname")
    assert read_token(tmp_path) is None
    after = keep_token(tmp_path)
    assert after != before
    assert (after is None) == (spoiled == "a folder")


def test_a_home_that_cannot_be_written_has_no_token(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    assert keep_token(tmp_path) is None


@pytest.mark.parametrize(
    ("endpoint", "url", "sent"),
    [
        (None, "http://127.0.0.1:8123", True),
        ("http://127.0.0.1:8123", "http://127.0.0.1:8123", True),
        ("http://localhost:8123/", "http://127.0.0.1:8123", True),
        ("http://127.0.0.1:8124", "http://127.0.0.1:8124", False),
        ("https://127.0.0.1:8123", "https://127.0.0.1:8123", False),
        ("http://models.example:8123", "http://models.example:8123", False),
    ],
)
def test_only_the_server_of_the_home_gets_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str | None, url: str, sent: bool
) -> None:
    monkeypatch.setenv("MILLSTREAM_HOME", str(tmp_path))
    token = keep_token(tmp_path)
    (tmp_path / "run" / "url").write_text("http://127.0.0.1:8123\n")
    server = find_server(endpoint, None)
    assert (server.url, server.key) == (url, token if sent else None)
    assert find_server(endpoint, "mine").key == "mine"
