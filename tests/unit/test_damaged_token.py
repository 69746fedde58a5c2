"""A damaged token file of a repository stops neither a start nor a reader, and the next change mends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.services.repository.endpoint_changes import activate_version
from millstream.services.repository.folder import FolderRepository
from tests.kit.versions import publish


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", b"{", b"x" * 100_000])
def test_a_damaged_token_hurts_no_model(tmp_path: Path, content: bytes) -> None:
    before = FolderRepository(tmp_path)
    publish(before, "m", 1)
    (tmp_path / ".token").write_bytes(content)
    if content.startswith(b"\xff"):
        assert before.token() != before.token()  # as during a change: readers read again
    reader = FolderRepository(tmp_path)
    assert list(reader.versions("m")) == [1]
    seen = reader.token()
    activate_version(reader, "m", 1)
    assert reader.token() != seen
    assert reader.token() == before.token()
    assert before.endpoint("m").active == 1
