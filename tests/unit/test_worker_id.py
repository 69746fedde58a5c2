from __future__ import annotations

from millstream.services.wire.worker_id import new_start, pool_of, worker_id


def test_a_worker_has_one_id_for_its_supervisor_and_itself():
    start = new_start()
    assert worker_id("cpu-0", start) == worker_id("cpu-0", start)
    assert [pool_of(worker_id(f"{pool}-12", start)) for pool in ("cpu", "my-gpu")] == ["cpu", "my-gpu"]


def test_two_containers_of_one_machine_name_and_pid_have_two_ids(monkeypatch):
    """As every container of an image may have: the same host name, the same boot, pid 1, the same index."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    monkeypatch.setattr("platform.node", lambda: "worker")
    assert len({worker_id("cpu-worker", new_start()) for _ in range(1000)}) == 1000
