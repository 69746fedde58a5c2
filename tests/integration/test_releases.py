"""Releases next to each other: on one Redis, in one installation, and while their processes come and go."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest

from millstream.services.queue.keys import PROTOCOL
from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import RedisAddress, client
from millstream.services.version import VERSION
from millstream.services.wire.batch import BATCH_FORMATS
from tests.kit import models, other_release, v2
from tests.kit.fleet import fleet
from tests.kit.metrics import Page
from tests.kit.previous_release import Release, previous_release
from tests.kit.redis_server import redis_server
from tests.kit.stack import sigstopped
from tests.kit.wait import wait_until

LEASE_S = 60  # workers that the test stops for a moment stay known
OURS = BATCH_FORMATS[-1]
REQUESTS = 10


@pytest.fixture
def address(tmp_path: Path) -> Iterator[RedisAddress]:
    (tmp_path / "redis").mkdir()
    with redis_server(choose_binary(""), tmp_path / "redis") as address:
        yield address


@pytest.fixture
def previous() -> Release:
    return previous_release()


def infer(http: httpx2.Client, value: float, factor: float = 2) -> None:
    body, headers = v2.request({"x": np.full((1, 2), value, np.float32)}, parameters={"timeout": 300_000_000})
    reply = http.post("/v2/models/scale/infer", content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    [answer] = v2.outputs(reply.content, dict(reply.headers)).values()
    assert answer.tolist() == [[factor * value] * 2]


def infer_many(http: httpx2.Client, factor: float) -> None:
    for value in range(REQUESTS):
        infer(http, value, factor)


def test_releases_of_two_protocols_serve_side_by_side(tmp_path, address):
    """Two fleets of one installation on one Redis: neither sees, takes or spoils anything of the other."""
    other = other_release.write(tmp_path / "other")
    with (
        fleet(tmp_path / "old", address, other, INSTALLATION_NAME="one") as old,
        fleet(tmp_path / "new", address, INSTALLATION_NAME="one") as new,
    ):
        of_old, of_new = old.gateway(), new.gateway()
        old_worker, new_worker = old.worker(index="0"), new.worker(index="0")
        old.push(of_old, "scale", models.scale(tmp_path / "three.onnx", 3.0))
        new.push(of_new, "scale", models.scale(tmp_path / "two.onnx"))
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(infer_many, of_old, 3), threads.submit(infer_many, of_new, 2)]:
                done.result()
        old.until_workers(of_old, 1)
        new.until_workers(of_new, 1)
        old.stop(old_worker)  # workers of one release do not take over what a worker of the other leaves
        infer(of_new, 1)
        old.worker(index="1")
        old.until_workers(of_old, 1)
        new.stop(new_worker)
        infer(of_old, 1, 3)
        new.worker(index="1")
        new.until_workers(of_new, 1)
        infer(of_new, 2)


@pytest.mark.parametrize("ours", ["gateway", "worker"])
def test_a_process_of_ours_works_with_one_of_the_previous_release(tmp_path, address, previous, ours):
    """Uploads, small and large tensors, a rollout, records and metrics, through both."""
    assert previous.protocol == PROTOCOL, f"neighbours no longer: tests/kit/previous_release.py has {previous.name}"
    trees = {name: None if name == ours else previous.tree for name in ("gateway", "worker")}
    with fleet(tmp_path / "fleet", address) as machines:
        http = machines.gateway(tree=trees["gateway"])
        machines.worker(tree=trees["worker"])
        machines.push(http, "scale", models.scale(tmp_path / "two.onnx"))
        infer_many(http, 2)
        machines.push(http, "wide", models.identity(tmp_path / "wide.onnx", shape=("N", 1 << 21)))
        large = np.arange(1 << 21, dtype=np.float32).reshape(1, -1)
        body, headers = v2.request({"x": large})
        reply = http.post("/v2/models/wide/infer", content=body, headers=headers)
        assert reply.status_code == 200, reply.text
        [answer] = v2.outputs(reply.content, dict(reply.headers)).values()
        np.testing.assert_array_equal(answer, large)
        machines.push(http, "scale", models.scale(tmp_path / "three.onnx", 3.0))
        infer_many(http, 3)
        wrong = http.post("/v2/models/scale/infer", json={"inputs": []})
        assert wrong.status_code == 400
        page = Page(http.get("/metrics").text)
        assert page.value("millstream_worker_records_unreadable") == 0
        assert page.value("millstream_batches_unreadable_total") == 0
        running = {one.labels["version"] for one in page.samples if one.name == "millstream_build_info"}
        assert running == {VERSION if ours == "gateway" else previous.version}


def test_a_checkout_without_history_says_so(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    with pytest.raises(AssertionError, match="git fetch --unshallow --tags"):
        previous_release(tmp_path)


def test_the_newest_tag_is_the_previous_release(tmp_path):
    """The release that is being made, at HEAD, is not its own predecessor."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=t", "-c", "user.email=t@localhost", *words], check=True)

    git("init", "-q")
    (tmp_path / "src" / "millstream").mkdir(parents=True)
    (tmp_path / "src" / "millstream" / "services").symlink_to("../../services")
    for folder in ("gateway", "services/queue", "workers", "examples"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").write_text("")
    for version, protocol in (("1.0.0", 4), ("1.1.0", 5)):
        (tmp_path / "services" / "version.py").write_text(f'VERSION = "{version}"\n')
        (tmp_path / "services" / "queue" / "keys.py").write_text(f"PROTOCOL = {protocol}\n")
        git("add", "-A")
        git("commit", "-q", "-m", version)
        git("tag", f"v{version}")
    found = previous_release(tmp_path, tmp_path / "releases")
    assert (found.name, found.version[:6], found.protocol) == ("v1.0.0", "1.0.0+", 4)
    assert (found.tree / "millstream" / "services" / "queue" / "keys.py").read_text() == "PROTOCOL = 4\n"


@pytest.mark.parametrize(("gateway", "worker"), [(True, False), (False, True), (True, True)])
def test_a_release_and_the_next_one_agree_on_formats(tmp_path, address, gateway, worker):
    with fleet(tmp_path / "fleet", address, QUEUE_LEASE_S=LEASE_S, QUEUE_DIRECT=False) as machines:
        http = machines.gateway(newer=gateway)
        process = machines.worker(newer=worker)
        machines.push(http, "scale", models.scale(tmp_path / "scale.onnx"))
        infer_many(http, 2)
        assert written(address, http, process.pid) == OURS + (gateway and worker)


def test_gateways_write_what_all_workers_read_as_they_come_and_go(tmp_path, address):
    """A rolling restart into the next release and back: never a format that a worker of the version cannot read."""
    with fleet(tmp_path / "fleet", address, QUEUE_LEASE_S=LEASE_S, QUEUE_DIRECT=False) as machines:
        http = machines.gateway(newer=True)
        first = machines.worker(newer=True, index="0")
        machines.push(http, "scale", models.scale(tmp_path / "scale.onnx"))
        infer(http, 1)
        assert written(address, http, first.pid) == OURS + 1
        second = machines.worker(index="1")
        machines.until_workers(http, 2)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda value: infer(http, value), range(8 * REQUESTS)))
        assert written(address, http, first.pid, second.pid) == OURS
        machines.stop(second)
        machines.until_workers(http, 1)
        assert written(address, http, first.pid) == OURS + 1
        page = http.get("/metrics").text
        assert "millstream_worker_records_unreadable 0" in page


def written(address: RedisAddress, http: httpx2.Client, *workers: int) -> int:
    """The format of a batch that lies in Redis while `workers` sleep."""

    def look(redis: Any) -> int | None:
        for key in redis.scan_iter("ms:*stream:*"):
            for _, fields in redis.xrange(key):
                length, number = struct.unpack_from("<IB", fields[b"e"])
                header = msgspec.msgpack.decode(fields[b"e"][5 : 5 + length])
                if not header[8]:  # not a readiness probe
                    return int(number)
        return None

    with client(address) as redis, ThreadPoolExecutor(1) as threads:
        with sigstopped(*workers):
            asked = threads.submit(infer, http, 1)
            found = wait_until(lambda: look(redis), what="a batch in Redis")
        asked.result()
    return found
