from __future__ import annotations

import pytest

from millstream.services.supervisor.lock import HostName
from millstream.services.wire.worker_id import new_start, pool_of, read_slot, slot_of, worker_id, worker_name


@pytest.mark.parametrize("pool", ["cpu", "my-gpu", "a-0-b"])
@pytest.mark.parametrize("host", ["", "web", "web-01", "node-3.example.org", "edge-access.2", "a b/c@d"])
def test_the_pool_of_a_worker_is_read_from_its_id(pool: str, host: str) -> None:
    """Names of pools and of hosts may have hyphens."""
    slot = slot_of(12, host)
    assert pool_of(worker_id(worker_name(pool, slot), new_start())) == pool
    assert read_slot(slot) == slot
    assert "/" not in slot


@pytest.mark.parametrize(
    ("text", "slot"), [("3", "3"), ("3@web-1", "3@web-1"), ("web-1", "0@web-1"), ("a@b", "0@a_b"), ("7 up", "0@7_up")]
)
def test_a_worker_that_is_started_by_hand_is_named_likewise(text: str, slot: str) -> None:
    assert read_slot(text) == slot


def test_two_containers_of_one_machine_name_and_pid_have_two_ids(monkeypatch):
    """As every container of an image may have: the same host name, the same boot, pid 1, the same index."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    monkeypatch.setattr("platform.node", lambda: "worker")
    assert len({worker_id("cpu-0@worker", new_start()) for _ in range(1000)}) == 1000


def test_supervisors_of_one_installation_on_one_host_have_different_names(monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "web-1")
    installation = new_start()
    first, second, third = HostName(), HostName(), HostName()
    assert [one.take(installation) for one in (first, second)] == ["web-1", "web-1.2"]
    assert third.take(new_start()) == "web-1", "of another installation"
    first.release()
    third.release()
    assert third.take(installation) == "web-1"
    for one in (second, third):
        one.release()
