"""One running product for the tests that only call it: starting one for each of them would take most of their time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.stack import Stack, assert_quiet, running_stack


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), gateways=2, pools="cpu=2") as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: Stack) -> Iterator[Stack]:
    """Two gateways and two CPU workers; after the test nothing of it is on its way or held."""
    yield shared_stack
    assert_quiet(shared_stack)
