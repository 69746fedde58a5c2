"""The port of `millstream serve`: which variable wins, and what a platform may set."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import millstream.services.cli.commands.serve  # noqa: F401 - the package has the function of this name
from millstream.services.errors import Failure

serve = sys.modules["millstream.services.cli.commands.serve"]
VARIABLES = ("MILLSTREAM_SAGEMAKER_PORT", "SAGEMAKER_BIND_TO_PORT", "MILLSTREAM_HTTP_PORT", "PORT")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(serve, "up", lambda **options: calls.append(options))
    monkeypatch.setenv("MILLSTREAM_ADMIN_KEY", "k")  # without these, `serve` sets them for `up`
    monkeypatch.setenv("MILLSTREAM_ALLOWED_HOSTS", "*")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return calls


def test_the_first_variable_that_is_set_wins(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    serve.serve(tmp_path)
    for port, name in enumerate(reversed(VARIABLES), 9000):
        monkeypatch.setenv(name, str(port))
        serve.serve(tmp_path)
    serve.serve(tmp_path, http_port=1)
    assert [options["http_port"] for options in started] == [8080, 9000, 9001, 9002, 9003, 1]


def test_a_port_that_is_none_is_refused(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("PORT", "http")
    with pytest.raises(Failure, match=r"^PORT: "):
        serve.serve(tmp_path)
    assert started == []
