"""python -m tests.bench.autoscaling.live: a step of 10 x and a sine, on real processes with simulated devices.

Prints when the pool grew and shrank, what was lost, and how long the 99th percentile was over the target.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from millstream.services.model.manifest import ModelConfig
from millstream.services.repository.folder import FolderRepository
from tests.bench.load import Payload
from tests.bench.open_loop import Answer, Arrivals, send
from tests.kit import v2
from tests.kit.stack import Stack, running_stack
from tests.kit.versions import publish_simulated
from tests.kit.wait import wait_until

RUN_S = 0.05  # of a simulated device, one row at a time: a worker answers 20 rows/s
TARGET_S = 0.5
HIGH_ROWS_PER_S = 60.0
WINDOW_S = 2.0
DOWN_S = 15
STEP_AT_S = 20.0
RECOVER_S = 10.0  # and a worker's start: by then the target is to be held again


def step(seconds: float) -> float:
    """A tenth for STEP_AT_S, all for 60 s, then a tenth again."""
    return 1.0 if STEP_AT_S <= seconds < STEP_AT_S + 60 else 0.1


def sine(seconds: float) -> float:
    """Between a tenth and all, in two minutes."""
    return 0.55 - 0.45 * math.cos(2 * math.pi * seconds / 120)


def _late_s(answers: list[Answer], begin: float) -> tuple[float, float]:
    """Return for how many seconds the 99th percentile was over the target, and when that ended."""
    windows: dict[int, list[float]] = {}
    for answer in answers:
        windows.setdefault(int((answer.due - begin) / WINDOW_S), []).append(answer.seconds)
    late = [at for at, seconds in windows.items() if np.percentile(seconds, 99) > TARGET_S]
    return len(late) * WINDOW_S, (max(late) + 1) * WINDOW_S if late else 0.0


def measure(stack: Stack, folder: Path, name: str, shape: Callable[[float], float], seconds: float) -> float:
    """Send the load, print what happened, and return when the 99th percentile was over the target last."""
    body, headers = v2.request({"x": np.ones((1, 4), np.float32)})
    path = folder / "body"
    path.write_bytes(body)
    payload = Payload(path, tuple(f"{key}: {value}" for key, value in headers.items()))
    arrivals = Arrivals("/v2/models/slow/infer", payload, HIGH_ROWS_PER_S, seconds, shape=shape)
    before = len(stack.lines)
    send(stack.url, arrivals)
    begin = min(answer.due for answer in arrivals.answers)
    wait_until(lambda: stack.lines[-1].startswith("pool cpu: 1 workers"), 120, "the pool is small again")
    late_s, until_s = _late_s(arrivals.answers, begin)
    sizes = [line.split()[2] for line in stack.lines[before:] if line.startswith("pool cpu: ")]
    statuses = Counter(answer.status for answer in arrivals.answers)
    p99 = np.percentile([answer.seconds for answer in arrivals.answers], 99)
    print(
        f"{name}: {len(arrivals.answers)} requests, statuses {dict(statuses)}; sizes {' '.join(sizes)}; "
        f"p99 {p99:.2f} s, over {TARGET_S} s for {late_s:g} s, last {until_s:g} s after the beginning"
    )
    return until_s


def main() -> None:
    settings = {"scale_down_s": DOWN_S, "scale_latency_ms": TARGET_S * 1000}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_stack(folder, pools="cpu=1:5,backend=simulated", controller=True, settings=settings) as stack:
            config = ModelConfig(pools=("cpu",), rows_max=1)
            publish_simulated(FolderRepository(stack.home / "repository"), "slow", {"run_s": RUN_S}, config=config)
            stack.settled("slow", 1)
            time.sleep(5)  # the controller has decided, and knows the run times
            if "--sine" not in sys.argv:
                after_s = measure(stack, folder, "step", step, 120) - STEP_AT_S
                start_s = stack.http.get("/admin/v1/scale/cpu").json()["start_s"]
                held = "held" if after_s <= RECOVER_S + start_s else "NOT held"
                print(f"step: late until {after_s:g} s after it; a start took {start_s:g} s: {held} in time")
            measure(stack, folder, "sine", sine, 120)


if __name__ == "__main__":
    main()
