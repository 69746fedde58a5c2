"""The port of `millstream serve`: which variable wins, and what a platform may set."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer

import millstream.services.cli.commands.serve  # noqa: F401 - the package has the function of this name
from millstream.services.errors import Failure
from millstream.services.settings import Settings
from tests.kit import models

pytestmark = pytest.mark.plugins

serve = sys.modules["millstream.services.cli.commands.serve"]
VARIABLES = ("SAGEMAKER_BIND_TO_PORT", "AIP_HTTP_PORT", "MILLSTREAM_HTTP_PORT", "PORT")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    calls: list[Settings] = []

    def run(settings: Settings, *, json_output: bool, required: bool) -> int:
        assert (json_output, required) == (False, True)
        calls.append(settings)
        return 0

    monkeypatch.setattr(serve, "run", run)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return calls


def test_the_first_variable_that_is_set_wins(
    started: list[Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    models.scale(tmp_path / "m.onnx")
    for port, name in enumerate((None, *reversed(VARIABLES), None), 8999):
        if name is not None:
            monkeypatch.setenv(name, str(port))
        with pytest.raises(typer.Exit):
            serve.serve(tmp_path, http_port=1 if port == 9004 else None)
    assert [settings.http_port for settings in started] == [8080, 9000, 9001, 9002, 9003, 1]
    assert {(settings.host, settings.preload) for settings in started} == {("0.0.0.0", f"none,model={tmp_path}/m.onnx")}
    assert all(settings.allowed_hosts == "*" for settings in started)


def test_a_port_that_is_none_is_refused(
    started: list[Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    models.scale(tmp_path / "m.onnx")
    monkeypatch.setenv("PORT", "http")
    with pytest.raises(Failure, match=r"^PORT: "):
        serve.serve(tmp_path)
    assert started == []
