"""A gateway whose uvicorn lacks a private part that it needs does not start, and names the part."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.fast_path import fast_path_protocol
from millstream.services.errors import Failure
from tests.kit.handlers import Held

ROOT = Path(__file__).parents[2]


def fast_path() -> type[Any]:
    return fast_path_protocol(Held(), 1 << 20, 100, ReceiveBudget(1 << 20), ReplyBudget(1 << 20))


def test_the_installed_uvicorn_has_all_hooks():
    fast_path()


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (HttpToolsProtocol, "_start_asgi_task"),
        (HttpToolsProtocol, "on_response_complete"),
        (FlowControl, "resume_reading"),
    ],
)
def test_a_missing_method_is_named_at_start(monkeypatch, owner, method):
    monkeypatch.delattr(owner, method)
    with pytest.raises(Failure, match=re.escape(f"{uvicorn.__version__} does not fit")) as refused:
        fast_path()
    assert f"{owner.__name__}.{method}" in refused.value.message


def test_a_hook_that_uvicorn_no_longer_calls_is_named_at_start(monkeypatch):
    monkeypatch.setattr(HttpToolsProtocol, "on_headers_complete", lambda self: self.url)
    with pytest.raises(Failure, match=r"_start_asgi_task in HttpToolsProtocol\.on_headers_complete"):
        fast_path()


def test_the_version_of_uvicorn_is_bounded_to_the_one_that_is_tested():
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gateway"]
    (bounds,) = [line for line in required if line.startswith("uvicorn")]
    major, minor = map(int, uvicorn.__version__.split(".")[:2])
    assert bounds == f"uvicorn>={major}.{minor},<{major}.{minor + 1}"
