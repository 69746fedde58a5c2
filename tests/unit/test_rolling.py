"""Parts of a rolling restart, over small real programs: trials, order of replacement, readiness, control socket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream.plugins.fleet.scaling import ScaleDecision
from millstream.plugins.fleet.supervisor import PoolScaler
from millstream.services.errors import Code, Failure, invalid
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.url import RedisAddress
from millstream.services.settings import Settings
from millstream.services.supervisor import control
from millstream.services.supervisor.child import TRIAL_DEATHS_MAX, Child
from millstream.services.supervisor.control import ControlSocket, Event, ReportEvent, send_request
from millstream.services.supervisor.parts import SupervisorParts
from millstream.services.supervisor.plan import Program
from millstream.services.supervisor.readiness import missing_versions, unordered
from millstream.services.supervisor.rolling import Rolling
from millstream.services.wire.records import InstanceRecord, RefusalRecord, State, WorkerRecord

PATIENCE_S = 30.0

#: signals readiness, and ends on SIGTERM; if its file exists it ends at once
GOOD = (
    "import os, sys, time; os.path.exists(sys.argv[1]) and sys.exit('in the way'); os.write(int(sys.argv[3]), b'ready')"
)
STAYS = GOOD + "; time.sleep(600)"
#: ignores SIGTERM
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + STAYS


class Nursery:
    """Starts children, and records their lines and deaths."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.died: list[tuple[str, int]] = []
        self.made: list[Child] = []
        self.blamed = 0  # number of the next deaths that a request is blamed for

    def program(self, name: str, code: str = STAYS) -> Program:
        return Program(name, (sys.executable, "-c", code, str(self.in_the_way_of(name))), signals_ready=True)

    def in_the_way_of(self, name: str) -> Path:
        return self.folder / f"{name}.stop"

    def start(self, program: Program, *, on_trial: bool = True) -> Child:
        child = Child(program, self.folder, self.said.append, self._on_death, on_trial=on_trial)
        self.made.append(child)
        child.start()
        return child

    async def _on_death(self, child: Child, pid: int) -> bool:
        self.died.append((child.program.name, pid))
        self.blamed -= 1
        return self.blamed >= 0

    async def running(self, *names: str) -> list[Child]:
        """Children that are ready and kept."""
        children = [self.start(self.program(name), on_trial=False) for name in names]
        for child in children:
            await asyncio.wait_for(child.ready.wait(), PATIENCE_S)
        return children

    def alive(self) -> list[str]:
        return [child.program.name for child in self.made if child.pid]

    async def end(self) -> None:
        for child in self.made:
            child.kill()
            await child.ended()


async def wait_until_ready(_: Child, new: Child) -> None:
    await new.ready.wait()


@pytest.fixture
def nursery(tmp_path: Path) -> Nursery:
    return Nursery(tmp_path)


def run(nursery: Nursery, work: Any) -> None:
    async def whole() -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await work
        finally:
            await nursery.end()

    asyncio.run(whole())


def test_a_child_on_trial_is_not_restarted(nursery):
    async def work() -> None:
        nursery.in_the_way_of("a").touch()
        child = nursery.start(nursery.program("a"))
        await child.ended()
        assert not child.ready.is_set()
        assert not child.end_trial()
        assert (child.exit_description, child.last_line) == ("ended with exit code 1", "in the way")
        assert nursery.said == []
        assert [name for name, _ in nursery.died] == ["a"]

    run(nursery, work())


def test_a_child_on_trial_is_restarted_after_a_death_caused_by_a_request(nursery):
    async def work() -> None:
        nursery.blamed = 3
        nursery.in_the_way_of("a").touch()
        child = nursery.start(nursery.program("a"))
        await child.ended()
        assert len(nursery.died) == 4, "started again after each of three deaths, and not after its own"
        nursery.blamed = TRIAL_DEATHS_MAX + 100
        endless = nursery.start(nursery.program("a"))
        await endless.ended()
        assert not endless.end_trial()
        assert len(nursery.died) == 4 + TRIAL_DEATHS_MAX + 1

    run(nursery, work())


def test_a_stop_counts_as_a_death_only_if_it_needed_a_kill(nursery):
    async def work() -> None:
        (child,) = await nursery.running("a")
        await child.stop(PATIENCE_S)
        await child.stop(PATIENCE_S)  # as a shut-down does with what a restart is stopping
        assert nursery.died == []
        stubborn = nursery.start(nursery.program("b", STUBBORN))
        await stubborn.ready.wait()
        pid = stubborn.pid
        await stubborn.stop(0.01)
        assert nursery.died == [("b", pid)]
        assert nursery.said == ["b did not stop within 0.01 s: killed"]

    run(nursery, work())


def test_children_are_replaced_one_by_one_with_the_new_one_started_first(nursery):
    async def work() -> None:
        first, second = await nursery.running("a", "b"), await nursery.running("c")
        before = {child.program.name: child.pid for child in (*first, *second)}
        told: list[Event] = []
        beside: list[int] = []

        async def ready(old: Child, new: Child) -> None:
            await new.ready.wait()
            assert old.pid == before[old.program.name]  # it was not asked to leave
            beside.append(len(nursery.alive()))

        await Rolling(nursery.start, ready, PATIENCE_S).run([first, second], told.append)
        assert beside == [4, 4, 4]
        assert [(event["event"], event["process"]) for event in told] == [
            (event, name) for name in ("a", "b", "c") for event in ("starting", "replaced")
        ]
        now = {child.program.name: child.pid for child in (*first, *second)}
        assert list(now) == ["a", "b", "c"]
        assert {event["process"]: event["pid"] for event in told if event["event"] == "replaced"} == now
        assert all(now[name] != before[name] for name in now)
        assert sorted(nursery.alive()) == ["a", "b", "c"]
        assert nursery.died == []

    run(nursery, work())


def test_pools_may_change_while_another_is_replaced(nursery):
    """What autoscaling starts and stops meanwhile: a new child is not replaced, one that left is not started again."""

    async def work() -> None:
        children = await nursery.running("a", "b", "c")
        leaves, before = children[1], {child.program.name: child.pid for child in children}
        told: list[Event] = []
        replacing: list[tuple[str, str]] = []

        async def ready(old: Child, new: Child) -> None:
            await new.ready.wait()
            assert rolling.replacing is not None
            replacing.append((rolling.replacing.name, old.program.name))
            if old.program.name == "a":
                children.remove(leaves)
                children.extend(await nursery.running("d"))

        rolling = Rolling(nursery.start, ready, PATIENCE_S)
        await rolling.run([children], told.append)
        assert rolling.replacing is None
        assert replacing == [("a", "a"), ("c", "c")]
        assert [(event["process"], event["of"]) for event in told if event["event"] == "starting"] == [
            ("a", 3),
            ("c", 2),
        ]
        assert sorted(child.program.name for child in children) == ["a", "c", "d"]
        now = {child.program.name: child.pid for child in children}
        assert now["a"] != before["a"]
        assert now["c"] != before["c"]
        assert sorted(nursery.alive()) == ["a", "b", "c", "d"]

    run(nursery, work())


def test_only_the_pool_whose_worker_is_replaced_is_paused(nursery):
    async def work() -> None:
        children: list[Child] = []

        def start(pool: str, index: int) -> None:
            program = replace(nursery.program(f"{pool}-{index}"), pool=pool, index=index)
            children.append(nursery.start(program, on_trial=False))

        paused: set[str] = set()
        parts = SupervisorParts(
            Settings(),
            RedisAddress.unix("/nowhere"),
            InstallationKeys("test"),
            workers=lambda: children,
            draining=list,
            start_worker=start,
            drain_worker=children.remove,
            may_resize=lambda pool: pool not in paused,
            show=lambda _: None,
        )
        scaler = PoolScaler({"cpu": (0, 4), "gpu": (0, 4)}, parts, _nothing)
        paused.add("cpu")
        scaler.follow({"cpu": 2, "gpu": 1})
        assert [child.program.name for child in children] == ["gpu-0"]
        paused.clear()
        scaler.follow({"cpu": 2, "gpu": 1})
        assert sorted(child.program.name for child in children) == ["cpu-0", "cpu-1", "gpu-0"]

    run(nursery, work())


async def _nothing() -> dict[str, ScaleDecision]:
    return {}


def test_replacements_are_restarted_after_their_trial(nursery):
    async def work() -> None:
        children = await nursery.running("a")
        await Rolling(nursery.start, wait_until_ready, PATIENCE_S).run([children], lambda _: None)
        pid = children[0].pid
        children[0].ready.clear()
        assert children[0].process is not None
        children[0].process.kill()
        await children[0].ready.wait()
        assert children[0].pid != pid
        assert nursery.died == [("a", pid)]

    run(nursery, work())


def test_a_replacement_that_is_not_ready_ends_the_restart_and_keeps_the_old_child(nursery):
    async def work() -> None:
        children = await nursery.running("a", "b", "c")
        pids = [child.pid for child in children]
        nursery.in_the_way_of("b").touch()
        with pytest.raises(Failure) as failed:
            await Rolling(nursery.start, wait_until_ready, PATIENCE_S).run([children], lambda _: None)
        message = failed.value.message
        assert message.startswith(
            "b was not replaced and keeps serving: its replacement was not ready: it ended with exit"
        )
        assert "in the way" in message
        assert message.endswith("(1 of 3 processes were replaced)")
        assert [child.program.name for child in children] == ["a", "b", "c"]
        assert children[0].pid != pids[0]
        assert [child.pid for child in children[1:]] == pids[1:]

        async def never(_: Child, new: Child) -> None:
            await new.ready.wait()
            raise Failure(Code.UNAVAILABLE, "no")

        with pytest.raises(Failure, match=r"not ready: no .*nothing was replaced"):
            await Rolling(nursery.start, never, PATIENCE_S).run([children[2:]], lambda _: None)
        assert children[2].pid == pids[2]
        assert sorted(nursery.alive()) == ["a", "b", "c"]

    run(nursery, work())


def test_a_cancelled_restart_leaves_all_running_children_in_the_lists(nursery):
    async def work() -> None:
        children = await nursery.running("a")
        waiting = asyncio.Event()

        async def never(_: Child, new: Child) -> None:
            await new.ready.wait()
            waiting.set()
            await asyncio.sleep(PATIENCE_S)

        task = asyncio.create_task(Rolling(nursery.start, never, PATIENCE_S).run([children], lambda _: None))
        await waiting.wait()
        task.cancel()
        await asyncio.wait({task})
        assert len(children) == 2
        await asyncio.gather(*(child.stop(PATIENCE_S) for child in children))
        assert nursery.alive() == []

    run(nursery, work())


def worker(name: str, **states: State) -> WorkerRecord:
    instances = tuple(
        InstanceRecord(content_id=content_id, model=content_id, version=1, state=state, reason="damaged")
        for content_id, state in states.items()
    )
    return WorkerRecord(
        id=name, pool="cpu", device="cpu", backend="x", pid=1, host="h", started=0, heartbeat=0, instances=instances
    )


def test_a_worker_is_ready_when_it_has_loaded_the_versions_of_the_old_one():
    old = worker("old", a=State.READY, b=State.READY, c=State.FAILED, d=State.LOADING, e=State.DRAINING)

    def missing(**states: State) -> frozenset[str] | None:
        return missing_versions([old, worker("new", **states)], "old", "new")

    assert missing_versions([old], "old", "new") is None
    assert missing() == frozenset("ab")
    assert missing(a=State.READY, b=State.WARMING) == frozenset("b")
    assert missing(a=State.READY, b=State.READY, c=State.FAILED) == frozenset()
    with pytest.raises(Failure, match="version 1 of b failed: damaged"):
        missing(a=State.READY, b=State.FAILED)
    # the old one is gone, or Redis forgot it: nothing is known that the new one should do
    assert missing_versions([worker("new")], "old", "new") == frozenset()


def test_a_new_worker_is_ordered_to_load_what_it_does_not_load_by_itself():
    old = worker("old", **dict.fromkeys("abcdefgh", State.READY), x=State.FAILED)
    missing = frozenset("abcdefgh")

    def orders(new: WorkerRecord, missing: frozenset[str], ordered: str = "", token: str = "t") -> str:
        found = unordered([old, new.model_copy(update={"token": token})], "old", "new", missing, set(ordered))
        return "".join(one.content_id for one in found)

    new = worker("new", a=State.LOADING)
    assert orders(new, missing, token="") == ""  # it follows no state of the repository yet
    assert orders(new, missing) == "bcde"
    assert orders(new, missing, "bcde") == ""
    more = worker("new", a=State.READY, b=State.LOADING, c=State.WARMING)
    assert orders(more, missing - {"a"}, "bcde") == "afg"  # what is ready is not unloaded for others
    assert orders(more, missing - {"a"}, "abcde") == "fg"
    assert orders(worker("new", **dict.fromkeys("abcdefgh", State.LOADING)), missing) == ""
    assert unordered([], "old", "new", missing, set()) == []


def test_a_new_worker_without_memory_for_a_version_is_ready_without_it():
    old, new = worker("old", a=State.READY, b=State.READY), worker("new", a=State.READY)
    refusal = RefusalRecord(content_id="b", kind="nothing_evictable", reason="it takes 9 bytes, 1 is free", until=9)
    assert missing_versions([old, new], "old", "new") == frozenset("b")
    assert missing_versions([old, new.model_copy(update={"refusals": (refusal,)})], "old", "new") == frozenset()
    failed = refusal.model_copy(update={"kind": "failed", "reason": "damaged"})
    with pytest.raises(Failure, match="b failed: damaged"):
        missing_versions([old, new.model_copy(update={"refusals": (failed,)})], "old", "new")


def talk(path: Path, work: Any, handle: Any) -> None:
    async def whole() -> None:
        listener = ControlSocket(handle)
        await listener.open(path)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await work
        finally:
            await listener.close()

    asyncio.run(whole())


async def heard(path: Path, request: Event) -> Sequence[Event]:
    return [event async for event in send_request(path, request)]


def test_a_command_receives_events_and_the_outcome(tmp_path):
    path = tmp_path / "c"

    async def handle(request: Event, tell: ReportEvent) -> None:
        for number in range(3):
            tell({"event": "counted", "number": number})
        if request["restart"] != "all":
            raise invalid("only all")

    async def work() -> None:
        assert [event["number"] for event in await heard(path, {"restart": "all"})] == [0, 1, 2]
        with pytest.raises(Failure, match="only all") as failed:
            await heard(path, {"restart": "x"})
        assert failed.value.code is Code.INVALID
        for nonsense in (b"x\n", b"[]\n", b"x" * 100_000 + b"\n"):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(nonsense)
            assert b'"failed"' in await reader.read()
            writer.close()

    talk(path, work(), handle)
    with pytest.raises(OSError):
        asyncio.run(heard(path, {}))


def test_a_request_continues_after_the_command_disconnects(tmp_path):
    path = tmp_path / "c"
    began, gone, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(_: Event, tell: ReportEvent) -> None:
        began.set()
        await gone.wait()
        for number in range(10):
            tell({"event": "going on", "number": number})
            await asyncio.sleep(0)
        done.set()

    async def work() -> None:
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(b"{}\n")
        await began.wait()
        writer.close()
        await writer.wait_closed()
        gone.set()
        await done.wait()

    talk(path, work(), handle)


def test_a_command_gives_up_on_a_supervisor_that_is_frozen(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "ACCEPTED_S_MAX", 0.1)
    with socket.socket(socket.AF_UNIX) as frozen:  # the kernel takes the request, and nobody reads it
        frozen.bind(str(tmp_path / "c"))
        frozen.listen()
        with pytest.raises(Failure, match=rf"\(pid {os.getpid()}\) has not answered for 0.1 s") as failed:
            asyncio.run(heard(tmp_path / "c", {}))
    assert failed.value.code is Code.UNAVAILABLE


def test_a_request_whose_command_gave_up_is_not_carried_out(tmp_path):
    path, handled = tmp_path / "c", []

    async def handle(request: Event, _: ReportEvent) -> None:
        handled.append(request)

    async def work() -> None:
        with socket.socket(socket.AF_UNIX) as gave_up:  # blocking calls: the supervisor does not run meanwhile
            gave_up.connect(str(path))
            gave_up.sendall(b'{"restart": "all"}\n')
        await heard(path, {"restart": "workers"})
        assert handled == [{"restart": "workers"}]

    talk(path, work(), handle)


def test_a_supervisor_reports_that_it_is_alive_while_a_request_lasts(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "HEARTBEAT_S", 0.001)
    path, enough = tmp_path / "c", asyncio.Event()

    async def handle(*_: object) -> None:
        await enough.wait()

    async def work() -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"{}\n")
        events = [json.loads(await reader.readline())["event"] for _ in range(4)]
        assert events == ["accepted", "alive", "alive", "alive"]
        enough.set()
        assert (await reader.read()).splitlines()[-1] == b'{"event": "done"}'
        writer.close()

    talk(path, work(), handle)


@pytest.mark.parametrize("heartbeats", [True, False], ids=["this release", "an earlier release"])
def test_a_command_limits_the_silence_of_a_supervisor_that_sends_heartbeats(tmp_path, monkeypatch, heartbeats):
    limits: list[float | None] = []
    read = control._read_event

    async def recorded(reader: Any, writer: Any, wait_s: float | None) -> bytes:
        limits.append(wait_s)
        return await read(reader, writer, wait_s)

    async def supervisor(_: object, writer: asyncio.StreamWriter) -> None:
        events = ["accepted"] * heartbeats + ["starting", "replaced", "done"]
        writer.write(b"".join(json.dumps({"event": event}).encode() + b"\n" for event in events))
        writer.close()

    async def work() -> None:
        async with await asyncio.start_unix_server(supervisor, tmp_path / "c"):
            assert [event["event"] for event in await heard(tmp_path / "c", {})] == ["starting", "replaced"]

    monkeypatch.setattr(control, "_read_event", recorded)
    asyncio.run(work())
    assert limits == [control.ACCEPTED_S_MAX, *([control.SILENCE_S_MAX] * 3 if heartbeats else [None] * 2)]


def test_a_command_notices_the_end_of_the_supervisor(tmp_path):
    path = tmp_path / "c"

    async def whole() -> None:
        began = asyncio.Event()

        async def handle(*_: object) -> None:
            began.set()
            await asyncio.sleep(PATIENCE_S)

        listener = ControlSocket(handle)
        await listener.open(path)
        asking = asyncio.create_task(heard(path, {}))
        await began.wait()
        await listener.close()
        with pytest.raises(Failure, match="ended before the request was complete"):
            await asking

    began = time.monotonic()
    asyncio.run(whole())
    assert time.monotonic() - began < PATIENCE_S
