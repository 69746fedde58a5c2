"""Loads run at low priority, and what they leave behind does not."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

from millstream.services.process.c_library import c_library
from millstream.services.process.threads import NICE, at_low_priority, in_own_thread, lower_priority
from millstream.services.repository.folder import FolderRepository
from millstream.workers.backends import get_backend
from millstream.workers.models.load_version import LoadEnvironment, open_form
from millstream.workers.residency.loader import LoadThreads
from tests.kit import models
from tests.kit.versions import SIGNATURE, publish_model
from tests.kit.wait import wait_until

ATTRIBUTES = struct.Struct("=IIQiIQQQII")
SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
SLICE_NS = 100_000_000


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


def test_a_lowered_thread_has_the_longest_slice() -> None:
    """Which a thread that wakes up preempts at once, from Linux 6.12 on: earlier ones always say 0."""
    attributes = at_low_priority(_attributes)
    assert attributes[3] == LOWERED
    assert attributes[5] in {0, SLICE_NS}
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    if release >= (6, 12):
        assert attributes[5] == SLICE_NS


def _attributes() -> tuple[int, ...]:
    """Return the fields of struct sched_attr of the calling thread."""
    room = ctypes.create_string_buffer(ATTRIBUTES.size)
    assert c_library().syscall(SCHED_GETATTR[platform.machine()], 0, room, ATTRIBUTES.size, 0) == 0
    return ATTRIBUTES.unpack(room.raw)


def test_forms_opened_one_after_the_other_serve_at_the_normal_priority(tmp_path: Path) -> None:
    """One thread opens all variants, and a session does not leave it at a low priority."""
    repository = FolderRepository(tmp_path / "repository")
    manifest = publish_model(repository, "one", models.crashing(tmp_path / "m.onnx", 7))
    folder = repository.folder_of(manifest)
    at = LoadEnvironment(get_backend("onnxruntime"), "onnxruntime", "cpu", 3)

    def levels() -> list[int]:
        seen: list[int] = []
        for _ in range(2):
            before = _threads()
            instance, _ = open_form(manifest, (folder, folder / manifest.served), at.backend, at, {}, 1)
            seen += [own(), *map(niceness, _until_left(2, before))]
            instance.close()
            _until_left(0, before)
        return seen

    assert in_own_thread(levels) == [NORMAL] * 6


def _until_left(count: int, before: set[int]) -> set[int]:
    """Wait until so many threads are left of those that were started; others of a load end a little later."""
    wait_until(lambda: len(_threads() - before) == count, what=f"{count} threads are left")
    return _threads() - before


def _threads() -> set[int]:
    return {int(one.name) for one in Path("/proc/self/task").iterdir()}


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
