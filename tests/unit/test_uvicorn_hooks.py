"""A gateway with a version of uvicorn whose private parts are not tested does not start."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.fast_path import fast_path_protocol
from millstream.gateway.connection.uvicorn_hooks import TESTED
from millstream.services.errors import Failure
from tests.kit.handlers import Held

ROOT = Path(__file__).parents[2]


def fast_path() -> type[Any]:
    return fast_path_protocol(Held(), 1 << 20, 100, ReceiveBudget(1 << 20), ReplyBudget(1 << 20))


def test_the_installed_uvicorn_is_a_tested_one():
    fast_path()


@pytest.mark.parametrize("version", ["0.53.9", "0.55.0", "0.540.0", "1.54.0"])
def test_another_version_is_named_at_start(monkeypatch, version):
    monkeypatch.setattr(uvicorn, "__version__", version)
    with pytest.raises(Failure, match=re.escape(f"uvicorn {version} does not fit")):
        fast_path()


def test_the_version_of_uvicorn_is_bounded_to_the_one_that_is_tested():
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gateway"]
    (bounds,) = [line for line in required if line.startswith("uvicorn")]
    major, minor = map(int, uvicorn.__version__.split(".")[:2])
    assert bounds == f"uvicorn>={major}.{minor},<{major}.{minor + 1}"
    assert f"{major}.{minor}." == TESTED
