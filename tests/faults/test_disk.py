"""Disks that are full and folders that cannot be written: an upload is refused whole, and serving goes on all the
while.
"""

from __future__ import annotations

import io
import os
import signal
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
import numpy as np
import orjson
import pytest
from sklearn.linear_model import LogisticRegression, Ridge

from millstream.services.errors import Code, Failure
from millstream.services.repository import disk as disks
from millstream.services.repository.disk import DiskSpace
from millstream.services.repository.folder import FolderRepository
from tests.contract.repositories import manifest, publish
from tests.kit import models, pickles, v2
from tests.kit.disk import Disk, plain_disk, small_disk
from tests.kit.load import Load, constant_load
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
DISK_BYTES = 32 * MIB
X = np.array([[1, 2], [3, 4]], np.float32)
PATIENT = {"timeout": 110_000_000}  # microseconds: a busy machine may let a worker wait for long
BODIES = [
    v2.request({"x": X * i}, binary=bool(i % 2), binary_outputs=bool(i % 2), parameters=PATIENT) for i in range(1, 9)
]
WAIT_S = 110  # for an upload to be ready
LARGE = np.arange(1 << 19, dtype=np.float32).reshape(1, -1)  # 2 MiB
FULL = "the disk is full; free space or delete versions"
REFUSED = "Permission denied; give this user the right to read and write it"
PAGES_MAX = 64  # a small version needs fewer


@contextmanager
def served(stack: Stack) -> Iterator[Load]:
    """Load on `kept` all the while: each of its answers is right, and there are some from each part of the block."""
    with constant_load(stack.port, "/v2/models/kept/infer", BODIES, callers=3) as load:
        load.more(20)
        yield load
        load.more(20)
    for answer in load.answers:
        assert answer.status == 200, answer.body
        got = v2.outputs(answer.body, answer.headers)["y"].astype(np.float32)
        np.testing.assert_array_equal(got, X * np.float32((answer.sent + 1) * 2))
    print(f"kept: {len(load.answers)} requests, all of them answered right")


def tree(folder: Path) -> dict[str, int]:
    """All that is in a folder, with its size."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size * path.is_file() for path in folder.rglob("*")}
    # Failed changes, too, may be named there, and are in the audit log.
    return {name: size for name, size in sizes.items() if name != ".changes" and not name.startswith("audit")}


def settled_tree(stack: Stack) -> dict[str, int]:
    """All that is in the repository, once what a load measured is stored, which comes after it is ready."""
    wait_until(lambda: "ready: kept version 1" in stack.logs(), what="the load of `kept` has ended")
    return tree(stack.home / "repository")


def upload(stack: Stack, name: str, content: bytes) -> httpx2.Response:
    return stack.http.post(f"/admin/v1/models/{name}/versions", params={"wait": WAIT_S}, content=content)


def refused(reply: httpx2.Response, status: int, words: str) -> None:
    """In one line, that says what to do."""
    assert (reply.status_code, reply.headers["content-type"]) == (status, "application/json")
    error = orjson.loads(reply.content)["error"]
    assert words in error
    assert "\n" not in error


def multiplied(stack: Stack, name: str) -> float:
    """By how much the model multiplies."""
    body, headers = v2.request({"x": X})
    reply = stack.http.post(f"/v2/models/{name}/infer", content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    y = v2.outputs(reply.content, reply.headers)["y"].astype(np.float32)
    np.testing.assert_array_equal(y, X * y[0, 0])
    return float(y[0, 0])


def test_uploads_are_refused_before_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [
        DiskSpace(64 << 30, disks.RESERVE_BYTES - MIB),
        DiskSpace(64 << 30, disks.RESERVE_BYTES),
        DiskSpace(1 << 30, 0),
    ]
    monkeypatch.setattr(disks, "disk_space", lambda _: sizes.pop(0))
    with pytest.raises(Failure, match="has 255 MiB left, and uploads leave 256 MiB free") as caught:
        disks.check_space(tmp_path)
    assert caught.value.code is Code.STORAGE
    disks.check_space(tmp_path)
    disks.check_space(tmp_path)  # a small disk


@pytest.mark.needs("tmpfs")
def test_a_full_disk_refuses_an_upload_whole_wherever_it_ends(tmp_path: Path) -> None:
    content = models.scale(tmp_path / "new.onnx", 3.0).read_bytes()
    kept = {"kept": models.scale(tmp_path / "kept.onnx")}
    statuses: Counter[int] = Counter()
    with (
        small_disk(DISK_BYTES) as disk,
        running_stack(tmp_path, disk=disk, models=kept) as stack,
        served(stack) as load,
    ):
        repository = stack.home / "repository"
        before = settled_tree(stack)
        # Each page more that is free lets it come one step further: to its bytes, its check, its documents.
        for pages in range(PAGES_MAX):
            disk.fill(left_bytes=pages * PAGE)
            reply = upload(stack, "new", content)
            disk.empty()
            statuses[reply.status_code] += 1
            if reply.status_code == 201:
                break
            refused(reply, 507, FULL)
            assert tree(repository) == before
            assert stack.http.get("/admin/v1/models/new").status_code == 404
            load.more(10)
        assert orjson.loads(reply.content)["version"] == 1
        assert orjson.loads(reply.content)["active"]
        assert multiplied(stack, "new") == 3
    print(f"uploads with ever more room: {dict(statuses)}")
    assert statuses[201] == 1
    assert statuses[507] >= 3


@pytest.mark.needs("tmpfs")
def test_a_disk_that_an_import_fills(tmp_path: Path) -> None:
    """By what the pickle unpacks to, and by what the import writes: refused whole, and the disk is given back."""
    bomb = LogisticRegression().fit([[0.0], [1.0]], [0, 1])
    bomb.extra_ = np.zeros(64 * MIB, np.uint8)
    wide = Ridge().fit(np.ones((2, 1)), np.ones((2, 3 * MIB)))
    kept = {"kept": models.scale(tmp_path / "kept.onnx")}
    with (
        small_disk(DISK_BYTES) as disk,
        running_stack(tmp_path, disk=disk, models=kept) as stack,
        served(stack) as load,
    ):
        repository = stack.home / "repository"
        before = settled_tree(stack)
        for model in (bomb, wide):
            body = pickles.dumped(model, compress=3)
            params: dict[str, str | int] = {"wait": WAIT_S, "allow_pickle": "true"}
            reply = stack.http.post("/admin/v1/models/new/versions", params=params, content=body, timeout=500)
            refused(reply, 507, FULL)
            assert tree(repository) == before
            load.more(10)
        wait_until(lambda: disk.free_bytes >= 16 * MIB, what="the disk is given back")


@pytest.mark.needs("tmpfs")
def test_a_disk_that_fills_up_during_an_upload(tmp_path: Path) -> None:
    """While its bytes come, and while it is unpacked: the caller hears of it, though it may still be sending."""
    content = models.wide(tmp_path / "wide.onnx", 1 << 19).read_bytes()
    zeros = io.BytesIO()
    with zipfile.ZipFile(zeros, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.onnx", content)
        archive.writestr("weights.bin", bytes(16 * MIB))
    kept = {"kept": models.scale(tmp_path / "kept.onnx")}
    with (
        small_disk(DISK_BYTES) as disk,
        running_stack(tmp_path, disk=disk, models=kept) as stack,
        served(stack) as load,
    ):
        repository = stack.home / "repository"
        before = settled_tree(stack)
        disk.fill(left_bytes=4 * MIB)
        for body in (os.urandom(12 * MIB), zeros.getvalue()):
            refused(upload(stack, "new", body), 507, FULL)
            assert tree(repository) == before
            load.more(10)
        wait_until(lambda: disk.free_bytes >= 3 * MIB, what="what it took it gave back")
        form = {"model": ("model.onnx", os.urandom(12 * MIB))}
        refused(stack.http.put("/admin/v1/models/new/versions/7", files=form), 507, FULL)
        assert tree(repository) == before
        disk.empty()
        reply = upload(stack, "new", zeros.getvalue())
        assert (reply.status_code, reply.json()["state"]) == (201, "ready"), reply.text


@pytest.mark.needs("tmpfs")
def test_what_is_there_is_served_by_a_start_on_a_full_disk(tmp_path: Path) -> None:
    kept = {"kept": models.scale(tmp_path / "kept.onnx")}
    content = models.scale(tmp_path / "new.onnx", 3.0).read_bytes()
    with small_disk(DISK_BYTES) as disk:
        with running_stack(tmp_path, disk=disk, models=kept) as stack:
            assert multiplied(stack, "kept") == 2
        disk.fill()
        with running_stack(tmp_path, disk=disk) as stack, served(stack):
            refused(upload(stack, "new", content), 507, FULL)
            disk.empty()
            assert upload(stack, "new", content).status_code == 201
            assert multiplied(stack, "new") == 3


@pytest.mark.needs("tmpfs")
def test_versions_can_be_deleted_from_a_full_disk() -> None:
    with small_disk(DISK_BYTES) as disk:
        repository = FolderRepository(disk.seen(disk.folder) / "repository")
        for version in (1, 2, 3):
            publish(repository, "old", version)
        publish(repository, "other")
        disk.fill()
        repository.delete_version("old", 1)
        repository.delete_version("old", 3)
        repository.delete_model("other")
        assert list(repository.models()) == ["old"]
        assert list(repository.versions("old")) == [2]
        assert repository.next_version("old") == 4
        assert disk.free_bytes > 0
        publish(repository, "old", 4)


@pytest.mark.needs("tmpfs")
def test_publishing_with_ever_more_room_leaves_nothing_or_a_version_that_is_active() -> None:
    refusals = 0
    with small_disk(DISK_BYTES) as disk:
        root = disk.seen(disk.folder) / "repository"
        repository = FolderRepository(root)
        publish(repository, "warm")  # the first change of all makes files that stay
        before = tree(root)
        for pages in range(PAGES_MAX):
            disk.fill(left_bytes=pages * PAGE)
            try:
                with repository.open_staging() as staging:
                    repository.publish(staging, manifest("new"), activate=True)
            except Failure as failure:
                assert failure.code is Code.STORAGE
                assert tree(root) == before
                refusals += 1
            else:
                break
            finally:
                disk.empty()
        assert list(repository.versions("new")) == [1]
        assert repository.endpoint("new").active == 1
    print(f"{refusals} refusals, then published")
    assert refusals >= 3


@pytest.mark.needs("setpriv")
def test_a_folder_that_cannot_be_written_refuses_uploads_and_serving_goes_on(tmp_path: Path) -> None:
    content = models.scale(tmp_path / "new.onnx", 3.0).read_bytes()
    kept = {"kept": models.scale(tmp_path / "kept.onnx")}
    with running_stack(tmp_path, disk=plain_disk(tmp_path), models=kept) as stack, served(stack) as load:
        repository = stack.home / "repository"
        before = settled_tree(stack)
        with read_only(repository):
            refused(upload(stack, "new", content), 500, REFUSED)
            refused(upload(stack, "kept", content), 500, REFUSED)
            refused(stack.http.delete("/admin/v1/models/kept"), 500, REFUSED)
            assert tree(repository) == before
            assert stack.http.get("/admin/v1/models/new").status_code == 404
            load.more(20)
        reply = upload(stack, "new", content)
        assert (reply.status_code, reply.json()["version"]) == (201, 1)
        assert multiplied(stack, "new") == 3


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """No file can be made, changed or removed below `folder`."""
    changed = [(path, path.stat().st_mode) for path in (folder, *folder.rglob("*"))]
    for path, mode in changed:
        path.chmod(mode & 0o555)
    try:
        yield
    finally:
        for path, mode in changed:
            path.chmod(mode)


@pytest.mark.needs("tmpfs")
def test_full_shared_memory_sends_large_tensors_another_way(tmp_path: Path) -> None:
    """No process touches a hole in a mapped file, which would kill it; a process that dies is started again, full as
    the disk is.
    """
    large = models.identity(tmp_path / "large.onnx", "FP32", ("N", LARGE.shape[1]))
    kept = {"kept": models.scale(tmp_path / "kept.onnx")}
    # A short path, whose socket lies in the home as seen from outside of the namespace, too.
    with small_disk(64 * MIB) as memory, TemporaryDirectory(prefix="millstream-home-") as folder:
        shm = memory.folder / "shm"
        memory.seen(shm).mkdir()
        # Only the shared memory is full: the home is beside it.
        home = Disk(Path(folder), memory.prefix, memory.root)
        with running_stack(tmp_path, disk=home, models=kept, settings={"shm_dir": shm}) as stack:
            with served(stack) as load:
                memory.fill()
                pids = stack.pids()
                stack.push("large", large)  # whose metrics find no room either
                ask_large(stack, 20)
                assert shared_bytes(stack) == 0
                load.more(20)
                assert stack.pids() == pids
                memory.empty()
                ask_large(stack, 5)
                assert shared_bytes(stack) >= 5 * LARGE.nbytes
            memory.fill()
            dead = {pids["cpu-0"], pids["gateway-0"]}
            for pid in dead:
                os.kill(pid, signal.SIGKILL)
            wait_until(
                lambda: stack.pids().keys() == pids.keys() and not set(stack.pids().values()) & dead, what="back"
            )
            wait_until(lambda: ready(stack), what="ready again")
            ask_large(stack, 5)
            assert multiplied(stack, "kept") == 2
            assert "no space for metrics in" in stack.logs()


def ask_large(stack: Stack, times: int) -> None:
    """Requests, one after the other, that are answered with what they sent."""
    body, headers = v2.request({"x": LARGE})
    for _ in range(times):
        reply = stack.http.post("/v2/models/large/infer", content=body, headers=headers)
        assert reply.status_code == 200, reply.text
        np.testing.assert_array_equal(v2.outputs(reply.content, reply.headers)["y"], LARGE)


def shared_bytes(stack: Stack) -> float:
    """How much went to workers through shared memory."""
    return stack.metrics().value("millstream_segment_bytes_total", direction="gateway_out")


def ready(stack: Stack) -> bool:
    with suppress(httpx2.TransportError):
        return stack.http.get("/v2/health/ready").status_code == 200
    return False
