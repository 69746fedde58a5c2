"""Whether the machine is idle, by the kernel's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millstream.services.process.idle_machine import is_idle


@pytest.mark.parametrize(
    ("text", "idle"),
    [
        ("some avg10=0.00 avg60=80.00 avg300=2.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", True),
        ("some avg10=19.99 avg60=0.00 avg300=0.00 total=1\n", True),
        ("some avg10=99.19 avg60=0.00 avg300=0.00 total=1\n", False),
    ],
)
def test_pressure_decides(tmp_path: Path, text: str, idle: bool) -> None:
    (tmp_path / "cpu").write_text(text)
    assert is_idle(tmp_path / "cpu") is idle


@pytest.mark.parametrize("text", [None, "", "full avg10=1", "\xff"])
def test_load_decides_where_the_kernel_measures_no_pressure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "cpu").write_text(text, encoding="latin-1")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for load, idle in ((0.5, True), (2.9, False)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 9.0, 9.0))
        assert is_idle(tmp_path / "cpu") is idle
