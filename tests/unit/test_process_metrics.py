"""What a process says of itself is what the kernel says of it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millstream.services.metrics import process
from millstream.services.metrics.process import ProcessMetrics, start_time
from millstream.services.metrics.registry import MetricsRegistry

ROOT = Path(__file__).parents[2]

# Uses processor time, counts once, and ends.
SHORT = """
import sys, time
from pathlib import Path
from millstream.services.metrics.process import ProcessMetrics
from millstream.services.metrics.registry import MetricsRegistry
registry = MetricsRegistry(Path(sys.argv[1]), "worker-cpu-0")
metrics = ProcessMetrics(registry)
metrics.start()
until = time.process_time() + 0.2
while time.process_time() < until:
    pass
metrics.stop()
registry.close()
print(time.process_time())
"""

# Opens files, starts threads, collects, and says by how much the numbers grew.
FOLLOWED = """
import gc, json, threading
from pathlib import Path
from millstream.services.metrics.process import ProcessMetrics
from millstream.services.metrics.registry import MetricsRegistry
gc.disable()
registry = MetricsRegistry(None, "gateway-3")
metrics = ProcessMetrics(registry)

def shown(name, *labels):
    metrics.update()
    [found] = [values[0] for key, values in registry.totals().items()
               if key.name == "millstream_process_" + name and key.labels == ("gateway-3", *labels)]
    return found

fds, threads = shown("open_fds"), shown("threads")
release = threading.Event()
started = [threading.Thread(target=release.wait) for _ in range(5)]
for thread in started:
    thread.start()
files = [Path("/dev/null").open() for _ in range(20)]
gc.collect()
collections = gc.get_stats()[2]["collections"]
print(json.dumps({"open_fds": shown("open_fds") - fds, "threads": shown("threads") - threads,
                  "collections": shown("gc_collections_total", "2") == collections > 0}))
release.set()
"""


def shown(registry: MetricsRegistry) -> dict[str, float]:
    return {
        key.name.removeprefix("millstream_process_"): values[0]
        for key, values in registry.totals().items()
        if key.labels[:1] == (registry.process,)
    }


def test_it_is_what_the_kernel_says() -> None:
    registry = MetricsRegistry(None, "gateway-3")
    metrics = ProcessMetrics(registry)
    before, now = time.process_time(), time.time()
    metrics.update()
    seen = shown(registry)
    assert before <= seen["cpu_seconds_total"] <= time.process_time()
    assert seen["resident_memory_bytes"] > 10 << 20
    assert seen["threads"] == len(list(Path("/proc/self/task").iterdir()))
    assert seen["max_fds"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert now - 24 * 3600 < seen["start_time_seconds"] <= now


def test_the_start_is_when_the_kernel_started_it() -> None:
    code = "from millstream.services.metrics.process import start_time; print(start_time())"
    before = time.time()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert before - 2 <= float(done.stdout) <= time.time() + 2  # the kernel gives the time of the boot in seconds


def test_open_files_threads_and_collections_are_followed() -> None:
    """In a process of its own: no other test opens files and ends threads there."""
    done = subprocess.run([sys.executable, "-c", FOLLOWED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"open_fds": 20, "threads": 5, "collections": True}


def test_without_a_free_descriptor_the_last_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = MetricsRegistry(None, "gateway-3")
    metrics = ProcessMetrics(registry)
    metrics.update()
    before = shown(registry)

    def none_left() -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(process, "_open_fds", none_left)
    metrics._try_update()
    after = shown(registry)
    assert after["open_fds"] == before["open_fds"]
    assert after["cpu_seconds_total"] >= before["cpu_seconds_total"]


def test_the_start_is_known_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "_PROC", tmp_path)
    assert start_time() == pytest.approx(time.time(), abs=60)


def test_processor_time_goes_on_after_a_restart_and_gauges_do_not(tmp_path: Path) -> None:
    mine = MetricsRegistry(tmp_path, "gateway-0")
    used = 0.0
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SHORT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        used += float(done.stdout)
    of_worker = {key.name: values[0] for key, values in mine.totals().items() if key.labels[:1] == ("worker-cpu-0",)}
    assert 0.4 <= of_worker["millstream_process_cpu_seconds_total"] <= used
    assert "millstream_process_resident_memory_bytes" not in of_worker
    assert "millstream_process_threads" not in of_worker
