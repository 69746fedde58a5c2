"""Loads run at low priority, and what they leave behind does not."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from millstream.services.process.low_priority import NICE, at_low_priority, lower_priority
from millstream.workers.backends import get_backend
from tests.kit import models
from tests.kit.versions import SIGNATURE


def niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def own() -> int:
    return niceness(threading.get_native_id())


LOWERED = min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICE)


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


def test_threads_of_a_loaded_model_serve_at_the_normal_priority(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "scale.onnx", columns=2)
    before = {int(one.name) for one in Path("/proc/self/task").iterdir()}
    seen: list[int] = []

    def load() -> None:
        instance = get_backend("onnxruntime").load(path, SIGNATURE, "cpu", 3)
        seen.append(own())
        started = {int(one.name) for one in Path("/proc/self/task").iterdir()} - before - {threading.get_native_id()}
        seen.extend(sorted(niceness(thread) for thread in started))
        instance.run({SIGNATURE.inputs[0].name: np.ones((1, 2), np.float32)})
        instance.close()

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    normal = niceness(os.getpid())
    assert seen == [LOWERED, normal, normal]
