"""Loads run at low priority, and what they leave behind does not."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from millstream.services.process.low_priority import NICE, at_low_priority, lower_priority
from millstream.workers.backends import get_backend
from millstream.workers.loads.load_threads import LoadThreads
from tests.kit import models
from tests.kit.versions import SIGNATURE


def niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def own() -> int:
    return niceness(threading.get_native_id())


NORMAL = os.getpriority(os.PRIO_PROCESS, os.getpid())
LOWERED = min(19, NORMAL + NICE)


def test_work_at_low_priority_leaves_the_caller_as_it_is() -> None:
    before = own()
    assert at_low_priority(own) == LOWERED
    assert at_low_priority(_lowered_again) == LOWERED
    with pytest.raises(ValueError, match="of the work"):
        at_low_priority(_fail)
    assert own() == before


def _lowered_again() -> int:
    lower_priority()
    return own()


def _fail() -> None:
    raise ValueError("of the work")


def test_a_main_thread_is_not_lowered() -> None:
    before = own()
    lower_priority()
    assert own() == before


def test_threads_of_every_loaded_model_serve_at_the_normal_priority(tmp_path: Path) -> None:
    """Also of the second one: a thread that was lowered loads no further model."""
    path = models.scale(tmp_path / "scale.onnx", columns=2)
    threads = LoadThreads(1)
    threads.renew()
    for _ in range(3):
        assert _priorities_of_a_load(threads, path) == [LOWERED, NORMAL, NORMAL]
        threads.renew()


def _priorities_of_a_load(threads: LoadThreads, path: Path) -> list[int]:
    """Return the nice levels of the thread that loads and of those that the library starts."""
    before = {int(one.name) for one in Path("/proc/self/task").iterdir()}
    seen: list[int] = []
    ended = threading.Event()

    def load() -> None:
        instance = get_backend("onnxruntime").load(path, SIGNATURE, "cpu", 3)
        seen.append(own())
        started = {int(one.name) for one in Path("/proc/self/task").iterdir()} - before - {threading.get_native_id()}
        seen.extend(sorted(niceness(thread) for thread in started))
        instance.run({SIGNATURE.inputs[0].name: np.ones((1, 2), np.float32)})
        instance.close()
        ended.set()

    threads.run(load)
    assert ended.wait(120)
    return seen
