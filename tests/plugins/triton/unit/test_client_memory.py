"""Shared memory of clients: names, bounds, one registry for several gateways, and clients that misbehave."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.gateway.access.principal import CALLER, KeyCounters, Principal
from millstream.plugins.compat.triton.shared_memory import REGIONS_MAX, ClientMemory, Region
from millstream.services.access.scopes import grants_of
from millstream.services.errors import Code, Failure
from millstream.services.metrics.registry import Counter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    (folder / "mine").write_bytes(bytes(range(100)))
    return folder


@pytest.fixture
def memory(folder: Path) -> ClientMemory:
    return ClientMemory(folder, "millstream-1", allowed=True)


def opened(folder: Path) -> int:
    """Descriptors of this process that lead into `folder`."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - gone while iterating
    return sum(link.is_symlink() and link.readlink().is_relative_to(folder) for link in links)


def refused(call: Callable[..., object], *arguments: object) -> Failure:
    with pytest.raises(Failure) as caught:
        call(*arguments)
    return caught.value


def test_read_and_write_within_a_region(memory: ClientMemory, folder: Path) -> None:
    memory.register("r", "/mine", 10, 50)
    assert memory.regions("r") == [Region("r", "/mine", 10, 50)]
    assert memory.read("r", 0, 50) == bytes(range(10, 60))
    assert memory.read("r", 49, 1) == bytes([59])
    memory.target("r", 4, 8).write(memoryview(b"abcd"), "y")
    assert (folder / "mine").read_bytes()[14:19] == b"abcd" + bytes([18])


def test_another_gateway_sees_what_one_registered_and_forgot(memory: ClientMemory, folder: Path) -> None:
    other = ClientMemory(folder, "millstream-1", allowed=True)
    memory.register("r", "mine", 0, 100)
    assert other.read("r", 0, 1) == b"\x00"
    assert refused(other.register, "r", "mine", 0, 1).code is Code.CONFLICT
    other.unregister("r")
    assert "Unable to find" in refused(memory.read, "r", 0, 1).message
    (folder / "else").write_bytes(b"x" * 10)
    other.register("r", "else", 0, 10)
    assert memory.read("r", 0, 2) == b"xx"


def test_a_name_is_taken_until_it_is_forgotten_and_forgetting_twice_is_no_error(memory: ClientMemory) -> None:
    memory.register("a", "mine", 0, 1)
    memory.register("b", "mine", 0, 1)
    failure = refused(memory.register, "a", "mine", 0, 1)
    assert (failure.code, failure.message) == (Code.CONFLICT, "shared memory region 'a' already in manager")
    memory.unregister("a")
    memory.unregister("a")
    memory.unregister("never")
    assert [region.name for region in memory.regions(None)] == ["b"]
    memory.unregister(None)
    assert memory.regions(None) == []
    assert refused(memory.regions, "b").code is Code.NOT_FOUND


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("/", "not a name"),
        ("", "not a name"),
        ("..", "not a name"),
        ("/../mine", "not a name"),
        ("a/b", "not a name"),
        ("/nul\0", "not a name"),
        ("/" + "x" * 300, "not a name"),
        ("/triton_python_backend_shm_region_1", "reserved"),
        ("/millstream-1-gateway", "reserved"),
        ("/not-there", "Unable to open shared memory region: '/not-there'"),
        ("/folder", "Unable to open"),
        ("/link", "Unable to open"),
        ("/pipe", "invalid args"),
        ("\ud800", "Unable to open"),
    ],
)
def test_names_that_are_no_memory_of_a_client(memory: ClientMemory, folder: Path, key: str, words: str) -> None:
    (folder / "folder").mkdir()
    (folder / "link").symlink_to(folder / "mine")
    os.mkfifo(folder / "pipe")
    failure = refused(memory.register, "r", key, 0, 1)
    assert failure.code is Code.INVALID
    assert words in failure.message
    assert memory.regions(None) == []


@pytest.mark.parametrize(("offset", "size"), [(0, 101), (100, 1), (-1, 5), (0, 0), (0, -1), (2**62, 2**62)])
def test_a_region_lies_within_its_memory(memory: ClientMemory, offset: int, size: int) -> None:
    failure = refused(memory.register, "r", "mine", offset, size)
    assert "failed to register shared memory region 'r': invalid args" in failure.message


@pytest.mark.parametrize(("offset", "size"), [(0, 51), (50, 1), (51, 0), (2**62, 1)])
def test_a_tensor_lies_within_its_region(memory: ClientMemory, offset: int, size: int) -> None:
    memory.register("r", "mine", 10, 50)
    for use in (memory.read, memory.target):
        message = refused(use, "r", offset, size).message
        assert message == "Invalid offset + byte size for shared memory region: 'r'"


def test_a_result_that_is_too_large_is_not_written(memory: ClientMemory, folder: Path) -> None:
    memory.register("r", "mine", 0, 100)
    failure = refused(memory.target("r", 0, 3).write, b"four", "y")
    assert failure.message.endswith("output 'y' (3 bytes) should be at least 4 bytes to hold the results")
    assert (folder / "mine").read_bytes() == bytes(range(100))


def test_a_client_that_shortens_its_memory_harms_nobody(memory: ClientMemory, folder: Path) -> None:
    memory.register("r", "mine", 0, 100)
    target = memory.target("r", 0, 100)
    os.truncate(folder / "mine", 10)
    assert "Invalid offset" in refused(memory.read, "r", 0, 100).message
    assert "Invalid offset" in refused(target.write, bytes(100), "y").message
    assert (folder / "mine").stat().st_size == 10


def test_a_region_that_is_forgotten_while_a_request_is_on_its_way_is_closed_after_it(
    memory: ClientMemory, folder: Path
) -> None:
    memory.register("r", "mine", 0, 100)
    target = memory.target("r", 0, 4)
    memory.unregister("r")
    assert memory.regions(None) == []
    target.write(b"late", "y")
    assert (folder / "mine").read_bytes()[:4] == b"late"
    assert opened(folder) == 1
    del target
    gc.collect()
    assert opened(folder) == 0


def test_nothing_is_served_unless_it_is_allowed(folder: Path) -> None:
    memory = ClientMemory(folder, "millstream-1", allowed=False)
    for call in (
        lambda: memory.register("r", "mine", 0, 1),
        lambda: memory.unregister(None),
        lambda: memory.read("r", 0, 1),
        lambda: memory.target("r", 0, 1),
    ):
        failure = refused(call)
        assert failure.code is Code.UNSUPPORTED
        assert "--shm-allow-clients" in failure.message
    assert memory.regions(None) == []
    assert sorted(path.name for path in folder.iterdir()) == ["mine"]


def test_their_number_is_bounded(memory: ClientMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert REGIONS_MAX > 100
    monkeypatch.setattr("millstream.plugins.compat.triton.shared_memory.REGIONS_MAX", 2)
    memory.register("a", "mine", 0, 1)
    memory.register("b", "mine", 0, 1)
    assert refused(memory.register, "c", "mine", 0, 1).code is Code.OVERLOADED


def replace(folder: Path, content: bytes, name: str = "mine") -> None:
    """What a client does that makes its memory anew: another file under the same name."""
    (folder / name).unlink()
    (folder / name).write_bytes(content)


@pytest.mark.parametrize("through", ["the same", "another"])
def test_a_region_that_is_registered_again_is_opened_again(memory: ClientMemory, folder: Path, through: str) -> None:
    other = ClientMemory(folder, "millstream-1", allowed=True)
    changing = memory if through == "the same" else other
    memory.register("r", "mine", 0, 100)
    assert memory.read("r", 0, 2) == other.read("r", 0, 2) == b"\x00\x01"
    for letter in (b"a", b"b", b"c"):  # no read in between
        changing.unregister("r")
        replace(folder, letter * 100)
        changing.register("r", "mine", 0, 100)
    for gateway in (memory, other):
        assert gateway.read("r", 0, 2) == b"cc"
        gateway.target("r", 0, 2).write(b"yz", "y")
        assert (folder / "mine").read_bytes()[:2] == b"yz"
        (folder / "mine").write_bytes(b"c" * 100)
    gc.collect()
    assert opened(folder) == 2


def test_memory_that_was_replaced_while_it_is_registered_is_refused_everywhere(
    memory: ClientMemory, folder: Path
) -> None:
    other, late = (ClientMemory(folder, "millstream-1", allowed=True) for _ in range(2))
    memory.register("r", "/mine", 0, 100)
    held = (folder / "mine").open("rb")  # as the client has it mapped: its inode is not used again
    assert memory.read("r", 0, 1) == other.read("r", 0, 1) == b"\x00"
    replace(folder, b"new" * 40)
    for gateway in (memory, other, late):
        for use in (gateway.read, gateway.target):
            failure = refused(use, "r", 0, 1)
            assert failure.code is Code.INVALID
            assert "'/mine' of shared memory region 'r' was replaced" in failure.message
    held.close()
    memory.unregister("r")
    memory.register("r", "/mine", 0, 100)
    assert memory.read("r", 0, 3) == other.read("r", 0, 3) == late.read("r", 0, 3) == b"new"


def test_memory_whose_name_was_removed_is_kept_by_who_has_it_open(memory: ClientMemory, folder: Path) -> None:
    memory.register("r", "mine", 0, 100)
    assert memory.read("r", 1, 1) == b"\x01"
    (folder / "mine").unlink()
    assert memory.read("r", 1, 1) == b"\x01"
    late = ClientMemory(folder, "millstream-1", allowed=True)
    assert "Unable to open" in refused(late.read, "r", 0, 1).message


def test_changes_within_a_tick_of_the_clock_are_seen(memory: ClientMemory, folder: Path) -> None:
    other = ClientMemory(folder, "millstream-1", allowed=True)
    for count in range(50):
        memory.register("r", "mine", count, 1)
        assert other.read("r", 0, 1) == bytes([count])
        memory.unregister("r")
        memory.register("r", "mine", count + 1, 1)
        assert other.regions("r") == [Region("r", "mine", count + 1, 1)]
        memory.unregister("r")


@contextmanager
def calling(key_id: str, scope: str = "infer:*") -> Iterator[None]:
    """Let the calls in the block be those of a key."""

    counter = Counter(memoryview(bytearray(8)).cast("d"), 0)
    counters = KeyCounters(key_id, lambda _: counter, counter, counter)
    token = CALLER.set(Principal(key_id, key_id, grants_of([scope]), math.inf, None, 0, counters))
    try:
        yield
    finally:
        CALLER.reset(token)


def test_a_region_is_unknown_to_other_keys(memory: ClientMemory) -> None:
    with calling("a"):
        memory.register("r", "mine", 0, 100)
        assert memory.read("r", 0, 1) == b"\x00"
    with calling("b"):
        unknown = "Unable to find shared memory region: 'r'"
        assert refused(memory.read, "r", 0, 1).message == refused(memory.target, "r", 0, 1).message == unknown
        assert refused(memory.regions, "r").code is Code.NOT_FOUND
        assert memory.regions(None) == []
        memory.unregister("r")
        memory.unregister(None)
        assert refused(memory.register, "s", "mine", 0, 1).code is Code.CONFLICT
    with calling("c", "admin"):
        assert [region.name for region in memory.regions(None)] == ["r"]
        assert memory.read("r", 1, 1) == b"\x01"
        memory.register("s", "mine", 0, 1)
        memory.unregister(None)
        assert memory.regions(None) == []


def test_what_was_registered_without_a_key_is_the_operators(memory: ClientMemory) -> None:
    memory.register("r", "mine", 0, 100)
    with calling("a"):
        assert memory.regions(None) == []
        assert refused(memory.read, "r", 0, 1).code is Code.INVALID
    with calling("", "admin"):
        assert memory.read("r", 0, 1) == b"\x00"


def test_a_request_without_a_known_key_uses_no_region_while_keys_are_checked(folder: Path) -> None:
    memory = ClientMemory(folder, "millstream-1", allowed=True, enforced=lambda: True)
    memory.register("r", "mine", 0, 100)
    assert [region.name for region in memory.regions(None)] == ["r"]  # an operator on this machine
    assert refused(memory.read, "r", 0, 1).code is Code.INVALID


def test_a_registration_of_an_earlier_release_has_no_owner(memory: ClientMemory, folder: Path) -> None:
    status = (folder / "mine").stat()
    memory._document.update(lambda content: content.update(r=["mine", 0, 9, status.st_dev, status.st_ino, "0123"]))
    with calling("0123"):
        assert memory.regions(None) == []
    assert memory.read("r", 0, 1) == b"\x00"
