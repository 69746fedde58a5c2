"""Collects these tests in the environment of `make test-frameworks` alone, which has every framework.

pytest ends with an error if it is asked for them elsewhere, since it then finds none.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.kit.stack import Stack, running_stack

collect_ignore_glob = [] if find_spec("onnxmltools") and find_spec("skops") else ["test_*.py"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running
