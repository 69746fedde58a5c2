"""What users can call, set and read changes only together with tests/unit/public_surface.txt."""

from __future__ import annotations

import difflib

import pytest

from tests.kit import public_surface

pytestmark = pytest.mark.plugins


def test_the_committed_surface_is_the_current_one() -> None:
    committed = public_surface.PATH.read_text(encoding="utf-8").splitlines()
    changes = list(difflib.unified_diff(committed, public_surface.surface().splitlines(), "committed", "current", n=0))
    assert not changes, "If you meant it: python -m tests.kit.public_surface\n" + "\n".join(changes)
