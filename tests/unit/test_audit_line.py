"""The log line and the audit entry about a change: what was set, and nothing of what was not."""

from __future__ import annotations

import logging

import pytest

from millstream.services.process.audit import CHANGES, Changes, acting, audit


def test_values_that_are_not_set_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    token = CHANGES.set(Changes())
    try:
        acting("127.0.0.1")
        with caplog.at_level(logging.INFO, "millstream.admin"):
            audit("uploaded", "m", version=1, pools="", activated=False, idle_s=0.0)
        found = CHANGES.get()
        assert found is not None
        assert found.model == "m"
        assert found.texts == ["uploaded: m, version 1, activated False, idle_s 0.0"]
    finally:
        CHANGES.reset(token)
    (record,) = caplog.records
    assert record.getMessage() == "uploaded: m, version 1, activated False, idle_s 0.0 (by 127.0.0.1)"
