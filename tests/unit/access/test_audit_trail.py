"""No caller can push entries out of the audit log by calls that fail, and the log says how many it has left out."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest

from millstream.gateway.access.audit_trail import KEYS_MAX, MINUTE_S, REFUSALS_A_MINUTE, AuditTrail, Refusals
from millstream.services.access.audit_log import AuditLog, Who
from millstream.services.process.audit import Changes
from tests.kit.application import OPERATOR, Application

pytestmark = pytest.mark.anyio


def who(key: str) -> Who:
    return Who(f"key {key}", key, "192.0.2.7")


class Trail:
    """A trail whose clock the test advances, and its log."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self._log = AuditLog(folder, "gateway")
        self.trail = AuditTrail(self._log, lambda: self.now)

    async def call(self, key: str, outcome: int = 404) -> None:
        await self.trail.write(who(key), "remove", "DELETE /x", outcome, Changes(), refused=outcome >= 400)

    @property
    def entries(self) -> list[dict[str, Any]]:
        return self._log.newest(10_000, lambda _: True)


async def test_calls_that_fail_are_bounded_for_each_key_and_changes_are_not(tmp_path: Path) -> None:
    log = Trail(tmp_path)
    for _ in range(50):
        await log.call("flood")
    await log.call("flood", 200)
    await log.call("other")
    by = [entry["key"] for entry in log.entries]
    assert by.count("flood") == REFUSALS_A_MINUTE + 1
    assert by.count("other") == 1
    assert any(entry["outcome"] == 200 for entry in log.entries)


async def test_what_was_left_out_is_counted_in_an_entry(tmp_path: Path) -> None:
    log = Trail(tmp_path)
    for _ in range(50):
        await log.call("flood")
    await log.trail.tell_left_out()
    assert len(log.entries) == REFUSALS_A_MINUTE  # its minute has not ended
    log.now = MINUTE_S
    await log.call("flood")  # before the others were told
    await log.trail.tell_left_out()
    await log.trail.tell_left_out()
    [entry] = [entry for entry in log.entries if entry["what"] == "left_out"]
    assert (entry["key"], entry["by"], entry["address"]) == ("flood", "key flood", "192.0.2.7")
    assert entry["changes"] == ["41 refused calls within a minute have no entry"]
    await log.call("flood")
    assert len(log.entries) == REFUSALS_A_MINUTE + 2


async def test_the_count_is_written_without_a_further_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.gateway.access.audit_trail.MINUTE_S", 0.0)
    log = Trail(tmp_path)
    for _ in range(REFUSALS_A_MINUTE + 1):
        await log.call("flood")
    log.now = MINUTE_S
    async with asyncio.timeout(30):
        while not any(entry["what"] == "left_out" for entry in log.entries):
            await asyncio.sleep(0)


async def test_a_stop_writes_the_count_of_a_minute_that_has_not_ended(tmp_path: Path) -> None:
    log = Trail(tmp_path)
    for _ in range(REFUSALS_A_MINUTE + 3):
        await log.call("flood")
    await log.call("other")
    await log.trail.close()
    await log.trail.close()
    told = [(entry["key"], entry["changes"]) for entry in log.entries if entry["what"] == "left_out"]
    assert told == [("flood", ["3 refused calls within a minute have no entry"])]


@pytest.mark.parametrize("telling", [False, True])
async def test_a_stop_does_not_wait_for_a_file_system_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, telling: bool
) -> None:
    monkeypatch.setattr("millstream.gateway.access.audit_trail.CLOSE_S_MAX", 0.1)
    log, writing, released = Trail(tmp_path), threading.Event(), threading.Event()
    for _ in range(REFUSALS_A_MINUTE + 1):
        await log.call("flood")

    def hang(*_: object) -> None:
        writing.set()
        released.wait()

    monkeypatch.setattr(AuditLog, "append", hang)
    if telling:
        log.now = MINUTE_S
        log.trail._tell()
        assert await asyncio.to_thread(writing.wait, 120)
    try:
        async with asyncio.timeout(120):
            await log.trail.close()
    finally:
        released.set()
    assert "writing took more than 0.1 s" in caplog.text


def test_keys_without_number_share_one_count() -> None:
    refusals = Refusals()
    for number in range(KEYS_MAX):
        assert refusals.may_write(who(f"{number}"), 0.0)
    late = sum(refusals.may_write(who(f"late-{number}"), 0.0) for number in range(100))
    assert late == REFUSALS_A_MINUTE
    assert [count for _, count in refusals.left_out(MINUTE_S)] == [100 - REFUSALS_A_MINUTE]
    assert not refusals.any_left_out
    assert refusals.may_write(who("new"), MINUTE_S)  # the others' minutes have ended, and are forgotten


async def test_wrong_calls_of_one_who_may_write_are_bounded(tmp_path: Path) -> None:
    application = Application(tmp_path)
    async with application.client() as client:
        for _ in range(3 * REFUSALS_A_MINUTE):
            assert (await client.delete("/admin/v1/models/none")).status_code == 404
        assert application.audit_text().count('"outcome":404') == REFUSALS_A_MINUTE


async def test_a_gateway_that_stops_says_how_many_calls_over_http_have_no_entry(tmp_path: Path) -> None:
    application = Application(tmp_path)
    async with application.served() as url, httpx2.AsyncClient(base_url=url, headers=OPERATOR) as client:
        for _ in range(REFUSALS_A_MINUTE + 3):
            assert (await client.delete("/admin/v1/models/none")).status_code == 404
        assert "left_out" not in application.audit_text()
    assert "3 refused calls within a minute have no entry" in application.audit_text()
