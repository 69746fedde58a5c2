"""What a worker is called."""

from services.worker_id import pool_of, worker_id


def test_a_worker_is_told_from_others_of_its_machine_and_its_pool_is_found():
    assert worker_id("cpu-0", 7) == worker_id("cpu-0", 7)
    assert len({worker_id("cpu-0", 7), worker_id("cpu-1", 7), worker_id("cpu-0", 8)}) == 3
    assert [pool_of(worker_id(f"{pool}-12", 7)) for pool in ("cpu", "my-gpu")] == ["cpu", "my-gpu"]
