"""What a load takes is measured in a process that does other things meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.services.process.process_memory import mapped_bytes, memory_use, own_bytes, reset_peak

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

MEASURE = """
import json, sys, threading
from pathlib import Path
import numpy as np
from millstream.workers.models.footprint_meter import FootprintMeter

traffic, stop, began = int(sys.argv[1]) << 20, threading.Event(), threading.Event()
runs = 0

def serve():
    global runs
    while not stop.is_set():
        buffer = np.ones(traffic, np.uint8)
        del buffer
        runs += 1
        began.set()

freed = [bytes(4000) for _ in range(20_000)]  # 80 MB that the allocator keeps when they are freed
thread = threading.Thread(target=serve)
if traffic:
    thread.start()
    began.wait()
del freed
meter = FootprintMeter(lambda: runs, Path(sys.argv[2]))
peak = np.ones(96 << 20, np.uint8)
held = [bytes(4000) for _ in range(8_000)] + [np.ones(32 << 20, np.uint8)]
del peak
found = meter.end()
stop.set()
print(json.dumps(found))
"""


@pytest.mark.parametrize("traffic_mib", [0, 24])
def test_neither_traffic_nor_freed_memory_hides_what_stays(tmp_path: Path, traffic_mib: int) -> None:
    command = [sys.executable, "-c", MEASURE, str(traffic_mib), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    resident, peak, disturbed, alone, *_ = json.loads(done.stdout)
    stays = 32 * MIB + 8_000 * 4033
    assert stays <= resident <= stays + (traffic_mib + 4) * MIB
    assert 90 * MIB <= peak + (resident - stays) <= (100 + 2 * traffic_mib) * MIB
    assert (disturbed, alone) == (bool(traffic_mib), True)


def test_the_memory_of_this_process() -> None:
    use = memory_use()
    assert use.anonymous > MIB
    assert use.data >= use.anonymous // 2
    assert use.peak >= use.anonymous
    assert use.threads >= 1
    assert abs(own_bytes() - use.own_bytes) < 64 * MIB
    assert reset_peak()


def test_pages_of_mapped_files_below_a_folder(tmp_path: Path) -> None:
    import mmap

    (tmp_path / "inside").mkdir()
    path = tmp_path / "inside" / "weights"
    path.write_bytes(bytes(8 * MIB))
    assert mapped_bytes(tmp_path / "inside") == 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        assert mapped_bytes(tmp_path / "inside") == 8 * MIB
        assert mapped_bytes(tmp_path / "outside") == 0
        assert mapped_bytes(tmp_path / "in") == 0
    assert mapped_bytes(tmp_path) == 0
