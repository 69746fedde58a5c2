"""Every process is replaced while callers go on, on connections that they keep; single processes are told to stop.

No request fails, none is refused, and readiness never goes: with one gateway and one worker, too.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from millstream.services.environment import child_environment
from millstream.services.version import VERSION
from tests.kit import models, v2
from tests.kit.load import Load, constant_load
from tests.kit.previous_release import previous_release
from tests.kit.scale_model import BODIES, check_answers
from tests.kit.stack import Stack, children, has_answer, running_stack, sigstopped
from tests.kit.wait import wait_until

OURS = Path(__file__).parents[2] / "src"
INFER = "/v2/models/m/infer"
READY = "/v2/health/ready"
#: with these, a request that had to wait for a lease to run out would fail
LONG_LEASES = {"queue_lease_s": 120}
DRAIN_S = 30  # a gateway has a tenth of it for refusing what is in flight
LONG_DRAIN_S = 300
BUSY_S = 60  # what a machine that has much else to do may take longer
WAIT_S = 120.0
RESTART_S_MAX = 500.0
TRIES = 5  # to see a run while it lasts
#: a gateway is rightly not ready if no answer came for this time: a machine may let it, or its worker, wait so long
FRESH_S = 2.5
GAP_S = 1.5  # between two answers of one caller, by which such a wait is recognised


def restart(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`millstream restart`, to its end."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "millstream.services.cli", "restart", "--home", str(stack.home), *arguments],
        env=child_environment({}),
        capture_output=True,
        text=True,
        timeout=RESTART_S_MAX,
        check=False,
    )


def restarted(stack: Stack, *arguments: str) -> list[dict[str, Any]]:
    """What `millstream restart` replaced, in order."""
    done = restart(stack, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    replaced: list[dict[str, Any]] = json.loads(done.stdout)["replaced"]
    return replaced


def closes(load: Load) -> int:
    """Answers that told their caller to go on elsewhere."""
    return sum(answer.headers.get("connection") == "close" for answer in load.answers)


class Watch:
    """Asks, on a connection of its own each time, whether the installation is ready; counts processes beside that."""

    def __init__(self, stack: Stack) -> None:
        self.statuses: Counter[int] = Counter()
        self.pooled: Counter[int] = Counter()
        self.processes_max = 0
        self.unready: list[tuple[float, float]] = []  # from when to when it was asked
        self._stack = stack
        self._errors: list[BaseException] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")

    def _run(self) -> None:
        limits = httpx2.Limits(max_keepalive_connections=4)
        try:
            with httpx2.Client(base_url=self._stack.url, timeout=WAIT_S, limits=limits, trust_env=False) as pool:
                while not self._stopping.wait(0.01):
                    self._look()
                    body, headers = BODIES[0]
                    self.pooled[pool.post(INFER, content=body, headers=headers).status_code] += 1
                    self.processes_max = max(self.processes_max, len(children(self._stack.process.pid)))
        except BaseException as error:
            self._errors.append(error)

    def _look(self) -> None:
        began = time.monotonic()
        reply = httpx2.get(self._stack.url + READY, timeout=WAIT_S, trust_env=False)
        self.statuses[reply.status_code] += 1
        if reply.status_code != 200:
            self.unready.append((began, time.monotonic()))

    def check(self, load: Load) -> None:
        """Check that it was ready unless a caller had to wait, and that all answers were right."""
        if self._errors:
            raise self._errors[0]
        for began, ended in self.unready:
            assert longest_wait_s(load, began - FRESH_S, ended) > GAP_S, "it answered, and was not ready"
        assert self.statuses.keys() <= {200, 503}, self.statuses
        assert set(self.pooled) == {200}, self.pooled


def longest_wait_s(load: Load, began: float, ended: float) -> float:
    """Return the longest time between two answers of one caller within a time."""
    longest_s = 0.0
    for caller in {answer.caller for answer in load.answers}:
        times = [answer.at for answer in load.answers if answer.caller == caller and began < answer.at < ended]
        longest_s = max([longest_s, *(after - before for before, after in pairwise([began, *times, ended]))])
    return longest_s


@contextmanager
def watching(stack: Stack, load: Load) -> Iterator[Watch]:
    watch = Watch(stack)
    watch._thread.start()
    try:
        yield watch
    finally:
        watch._stopping.set()
        watch._thread.join(WAIT_S)
    watch.check(load)


@pytest.mark.parametrize(("gateways", "workers"), [(1, 1), (2, 2)])
def test_everything_is_replaced_under_load_and_nobody_notices(tmp_path: Path, gateways: int, workers: int) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(
        tmp_path, gateways=gateways, pools=f"cpu={workers}", models={"m": path}, settings=LONG_LEASES
    ) as stack:
        before = stack.pids()
        with constant_load(stack.port, INFER, BODIES, callers=6) as load, watching(stack, load) as watch:
            load.more(50)
            replaced = restarted(stack)
            load.more(50)
        check_answers(load)
        after = stack.pids()
        names = [f"cpu-{i}" for i in range(workers)] + [f"gateway-{i}" for i in range(gateways)]
        assert [one["process"] for one in replaced] == names  # one after the other, in this order
        assert {one["process"]: one["pid_before"] for one in replaced} == {name: before[name] for name in names}
        assert {one["process"]: one["pid"] for one in replaced} == {name: after[name] for name in names}
        assert all(before[name] != after[name] for name in names)
        assert before["redis"] == after["redis"]
        assert watch.processes_max <= len(before) + 1  # never more than one beside those that serve
        assert stack.metrics().value("millstream_batches_reclaimed_total") == 0  # what was leased went back or was run
        assert not any("restarting it" in line for line in stack.lines)  # a planned end is no death
        print(
            f"{gateways} gateways, {workers} workers: {len(load.answers)} answers on {6 + closes(load)} connections, "
            f"{watch.pooled[200]} on a pool's; 0 failed, 0 refused; ready {watch.statuses[200]} times of as many"
        )


def test_an_upgrade_from_the_previous_release_fails_no_request(tmp_path: Path) -> None:
    """As docs/operations.md says: what is installed is replaced below a running `up`, then `millstream restart`."""
    previous = previous_release()
    installed = tmp_path / "installed"
    installed.symlink_to(previous.tree)
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(
        tmp_path,
        gateways=2,
        pools="cpu=2",
        models={"m": path},
        settings={**LONG_LEASES, "admin_key": "known-to-both-releases"},  # the previous one writes no token
        environment={"PYTHONPATH": str(installed)},
    ) as stack:
        before = stack.pids()
        assert releases(stack) == {previous.version}
        with constant_load(stack.port, INFER, BODIES, callers=6) as load, watching(stack, load):
            load.more(50)
            (tmp_path / "new").symlink_to(OURS)
            (tmp_path / "new").rename(installed)
            replaced = restarted(stack)
            load.more(50)
        check_answers(load)
        assert [one["process"] for one in replaced] == ["cpu-0", "cpu-1", "gateway-0", "gateway-1"]
        assert not set(before.values()) & {one["pid"] for one in replaced}
        wait_until(lambda: releases(stack) == {VERSION}, what="only the new release is left")
        assert stack.metrics().value("millstream_batches_reclaimed_total") == 0
        assert stack.metrics().value("millstream_batches_unreadable_total") == 0


def releases(stack: Stack) -> set[str]:
    """The releases of the processes that run, as they say."""
    return {
        one.labels["version"] for one in stack.metrics().samples if one.name == "millstream_build_info" and one.value
    }


def test_a_hangup_signal_asks_for_the_same_and_a_second_restart_waits_for_the_first(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, models={"m": path}, settings=LONG_LEASES) as stack:
        before = stack.pids()
        with constant_load(stack.port, INFER, BODIES, callers=2) as load:
            load.more(10)
            with sigstopped(before["redis"]):  # a process that starts now waits for it
                stack.process.send_signal(signal.SIGHUP)
                stack.wait_for_line("SIGHUP: replacing all processes")
                refused = restart(stack)
                assert refused.returncode == 1
                assert refused.stderr.strip() == "error: a restart is already in progress: wait for its end"
            stack.wait_for_line("gateway-0 was replaced")
            load.more(10)
        check_answers(load)
        assert all(stack.pids()[name] != before[name] for name in ("cpu-0", "gateway-0"))


def test_a_restart_asked_of_a_frozen_supervisor_says_so_and_is_not_made_up_for_later(tmp_path: Path) -> None:
    with running_stack(tmp_path, settings=LONG_LEASES) as stack:
        before = stack.pids()
        with sigstopped(stack.process.pid):
            refused = restart(stack, "gateways")
        assert refused.returncode == 1
        assert f"pid {stack.process.pid}) has not answered" in " ".join(refused.stderr.split())
        replaced = restarted(stack, "workers")
        assert [one["process"] for one in replaced] == ["cpu-0"]
        assert stack.pids()["gateway-0"] == before["gateway-0"]


def test_a_replacement_that_cannot_start_leaves_the_old_one_serving(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, models={"m": path}, settings=LONG_LEASES) as stack:
        before = stack.pids()
        (served,) = (stack.home / "repository" / "models" / "m" / "1").rglob("*.onnx")
        content = served.read_bytes()
        served.chmod(0o600)
        with constant_load(stack.port, INFER, BODIES, callers=4) as load, watching(stack, load):
            served.write_bytes(content[:-1])  # the disk loses a byte of what the worker has long loaded
            failed = restart(stack)
            assert failed.returncode == 1
            assert failed.stdout == ""
            assert failed.stderr.startswith(
                "error: cpu-0 was not replaced and keeps serving: its replacement was not ready"
            )
            assert "sha256 differs" in failed.stderr
            assert failed.stderr.endswith("(nothing was replaced)\n")
            assert failed.stderr.count("\n") == 1
            wait_until(lambda: stack.pids() == before, what="the replacement is gone")
            load.more(20)

            served.write_bytes(content)
            with ThreadPoolExecutor(1) as beside, sigstopped(before["redis"]):  # what starts now waits for it
                restarting = beside.submit(restart, stack, "gateways")
                known = set(before.values())
                (new,) = wait_until(lambda: set(children(stack.process.pid)) - known, what="the replacement")
                os.kill(new, signal.SIGKILL)
                failed = restarting.result(RESTART_S_MAX)
            assert failed.returncode == 1
            assert "gateway-0 was not replaced and keeps serving" in failed.stderr
            wait_until(lambda: stack.pids() == before, what="the replacement is gone")
            load.more(20)

            assert [one["process"] for one in restarted(stack)] == ["cpu-0", "gateway-0"]
            load.more(20)
        check_answers(load)
        assert not any("restarting it" in line for line in stack.lines)


def slow_requests(stack: Stack, number: int) -> list[http.client.HTTPConnection]:
    """Requests in flight: no worker runs them yet."""
    body, headers = BODIES[0]
    sent = [stack.send(INFER, body, headers) for _ in range(number)]
    wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= number)
    return sent


def leaves(gateway: httpx2.Client) -> bool:
    """Whether the gateway says that it leaves.

    Not ready alone is no sign: it may have waited long for a worker that sleeps.
    """
    reply = gateway.get(READY)
    return (reply.status_code, reply.headers.get("connection")) == (503, "close")


def told(connections: Sequence[http.client.HTTPConnection]) -> list[tuple[int, str | None, str | None]]:
    """Status, Connection and Retry-After of what was in flight."""
    replies = []
    for connection in connections:
        reply = connection.getresponse()
        reply.read()
        replies.append((reply.status, reply.getheader("connection"), reply.getheader("retry-after")))
        connection.close()
    return replies


def test_a_gateway_that_is_told_to_stop_answers_what_it_has(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    settings = LONG_LEASES | {"drain_s": LONG_DRAIN_S}
    with running_stack(tmp_path, gateways=2, models={"m": path}, settings=settings) as stack:
        pids = stack.pids()
        leaving, staying = pids["gateway-0"], pids["gateway-1"]
        with stack.gateway(0) as gateway, constant_load(stack.port, INFER, BODIES, callers=2) as load:
            load.more(10)
            with sigstopped(pids["cpu-0"]):
                with sigstopped(staying):
                    sent = slow_requests(stack, 20)
                    began = time.monotonic()
                    os.kill(leaving, signal.SIGTERM)
                    # the gateway's own connection is still served, and says so first, while nothing else has changed
                    wait_until(lambda: leaves(gateway), what="not ready")
                    assert stack.pids()["gateway-0"] == leaving
                # new connections go to the other one, which is there for the installation
                assert httpx2.get(stack.url + "/v2/health/live", trust_env=False).headers.get("connection") is None
            assert told(sent) == [(200, "close", None)] * 20
            wait_until(lambda: stack.pids().get("gateway-0", leaving) != leaving, what="gone")
            took_s = time.monotonic() - began
            load.more(10)
        check_answers(load)
        assert took_s < 0.9 * LONG_DRAIN_S  # no limit was reached
        print(f"20 of 20 in flight answered, {len(load.answers)} beside them; gone after {took_s:.2f} s")
        stack.wait_for_line("gateway-0 ended with exit code 0: restarting it")


def test_what_is_not_answered_in_time_is_refused_not_cut(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, models={"m": path}, settings=LONG_LEASES | {"drain_s": DRAIN_S}) as stack:
        with sigstopped(stack.pids()["cpu-0"]):
            sent = slow_requests(stack, 10)
            began = time.monotonic()
            stack.process.send_signal(signal.SIGTERM)
            assert told(sent) == [(503, "close", "1")] * 10
            wait_until(lambda: "gateway-0" not in stack.pids(), what="gone")
            print(f"10 of 10 refused; the gateway was gone after {time.monotonic() - began:.2f} s of at most {DRAIN_S}")
        assert stack.end() == 0
        took_s = time.monotonic() - began
        assert took_s < DRAIN_S + BUSY_S  # no lease had to expire
        assert not any("gateway-0 did not stop" in line for line in stack.lines)


def test_a_run_that_outlasts_the_drain_is_given_to_others_at_once(tmp_path: Path) -> None:
    path = models.slow(tmp_path / "slow.onnx", rounds=400_000)  # several times as long as the drain
    config = {"rows_max": 1}
    with running_stack(tmp_path, settings=LONG_LEASES | {"drain_s": 0.3, "queue_direct": False}) as stack:
        stack.push("slow", path, config=json.dumps(config))
        worker = stack.pids()["cpu-0"]
        body, headers = v2.request({"x": np.ones((1, 128), np.float32)}, parameters=v2.PATIENT)
        for _ in range(TRIES):
            sent = [stack.send("/v2/models/slow/infer", body, headers) for _ in range(4)]
            # it runs; behind so long a run nothing is taken
            wait_until(lambda: _leased(stack) or all(has_answer(one) for one in sent))  # noqa: B023
            if _leased(stack):
                break
            assert told(sent) == [(200, None, None)] * 4  # before a lease was seen
        os.kill(worker, signal.SIGTERM)
        stack.wait_for_line("cpu-0 ended with exit code 3: restarting it")
        assert "it is given to other workers" in stack.logs()
        assert told(sent) == [(200, None, None)] * 4
        # it gave its lease back: no gateway took it for a worker that its batch killed
        assert stack.metrics().value("millstream_batches_reclaimed_total") == 0


def _leased(stack: Stack) -> int:
    """Batches that a worker has and has not answered."""
    return sum(int(stack.redis.xpending(key, "w")["pending"]) for key in stack.redis.scan_iter("ms:*:stream:*"))
