"""A running installation's shared memory is no leftover of a killed test run, also before its first request."""

from __future__ import annotations

from pathlib import Path

from tests.kit.shm_leftovers import prefixes_in_use
from tests.kit.stack import running_stack


def test_an_installation_that_runs_is_in_use(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack:
        assert list(stack.shm_dir.glob(f"{stack.shm_prefix}.*")) != []
        assert stack.shm_prefix in prefixes_in_use(stack.shm_dir)
