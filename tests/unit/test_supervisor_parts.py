"""Parts of the supervisor without processes: plans, logs, CPU quota, ports, shared memory cleanup."""

from __future__ import annotations

import select
import socket

import pytest

from millstream.services.errors import Failure
from millstream.services.process.exit_status import describe_exit
from millstream.services.segments.segment import remove_segments
from millstream.services.settings import Settings
from millstream.services.supervisor import plan
from millstream.services.supervisor.listener import local_url_of, reserve, url_of
from millstream.services.supervisor.log import Alerts, LogFile
from millstream.services.supervisor.plan import EntryCommands
from millstream.services.supervisor.pool_specs import (
    PoolSpec,
    check_device_memory,
    device_budget,
    memory_of_pools,
    parse_pools,
    worker_counts,
)


def test_pools():
    assert parse_pools("cpu=2, gpu=1,") == {"cpu": PoolSpec(2), "gpu": PoolSpec(1, "cuda")}
    assert parse_pools("gpu=1,device=cuda:1,threads=4,memory=16GiB,backend=onnxruntime,cpu=2") == {
        "gpu": PoolSpec(1, "cuda:1", 4, "16GiB", "onnxruntime"),
        "cpu": PoolSpec(2),
    }
    for wrong in ("", "cpu", "cpu=", "cpu=x", "cpu=0", "=1", "cpu=2000", "a b=1", "cpu=1,cpu=1", "gateway=1"):
        with pytest.raises(Failure, match="--pool"):
            parse_pools(wrong)


@pytest.mark.parametrize(
    ("text", "least", "most", "initial", "elastic"),
    [("cpu=3", 3, 3, 3, False), ("cpu=1:4", 1, 4, 1, True), ("cpu=0:4", 0, 4, 1, True), ("cpu=2:2", 2, 2, 2, True)],
)
def test_pools_whose_size_the_controller_decides(text, least, most, initial, elastic):
    spec = parse_pools(f"{text},threads=2")["cpu"]
    assert (spec.least, spec.workers, spec.initial, spec.elastic) == (least, most, initial, elastic)
    assert f"cpu={spec.size}" == text
    assert worker_counts(text) == {"cpu": most}


@pytest.mark.parametrize("wrong", ["cpu=4:1", "cpu=-1:4", "cpu=0:0", "cpu=1:", "cpu=:4", "cpu=1:2:3", "cpu=1:9999"])
def test_sizes_that_are_wrong(wrong):
    with pytest.raises(Failure, match="--pool"):
        parse_pools(wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("threads=4", "an option follows its pool, like gpu=1,threads=4"),
        ("gpu=1,device=gpu", "--pool gpu=1,device=gpu: devices are cpu, cuda[:N] and tensorrt[:N]"),
        ("a=1,threads=0", "--pool a=1,threads=0: threads are 1 to 1024"),
        ("a=1,threads=two", "threads are 1 to 1024"),
        ("a=1,memory=much", "--pool a=1,memory=much: write a size like 8GiB"),
        ("cpu=1,threds=2", "did you mean the option threads=2"),
        ("a=1,memory=1MiB", "too small for one worker"),
        ("a=1,backend=onnx", "did you mean 'onnxruntime'"),
        ("a=1,threads=2,threads=3", "threads is given twice"),
        ("a=1,thread=cpu", "did you mean 'threads'?"),
        ("controller=1", "a pool cannot be named controller"),
    ],
)
def test_options_of_pools_that_are_wrong(wrong, said):
    with pytest.raises(Failure) as refused:
        parse_pools(wrong)
    assert said in refused.value.message


def test_memory_is_given_for_a_pool_or_for_all_but_not_twice():
    assert memory_of_pools("cpu=1", "8GiB") == "8GiB"
    assert memory_of_pools("cpu=1,memory=2GiB,gpu=1", None) == "cpu=2GiB"
    assert memory_of_pools("cpu=1,memory=2GiB,gpu=1", "8GiB") == "8GiB,cpu=2GiB"
    with pytest.raises(Failure, match="the memory of the pool cpu is given twice"):
        memory_of_pools("cpu=1,memory=2GiB", "cpu=8GiB")


def test_workers_share_the_machine_unless_threads_are_set():
    assert plan.threads_of_pools(Settings(pools="cpu=2,b=1"), 16) == {"cpu": 5, "b": 5}
    assert plan.threads_of_pools(Settings(pools="cpu=4"), 2) == {"cpu": 1}
    assert plan.threads_of_pools(Settings(pools="gpu=1,threads=2,cpu=2"), 16) == {"gpu": 2, "cpu": 7}
    assert plan.threads_of_pools(Settings(pools="gpu=2,threads=8,cpu=1"), 4) == {"gpu": 8, "cpu": 1}


def test_settings_survive_the_environment_of_children(tmp_path, monkeypatch):
    settings = Settings(
        home=tmp_path,
        admin_key="secret",
        pools="cpu=1,gpu=2",
        preload="a=b",
        host="::1",
        metrics_port=9100,
    )
    children = plan.settings_of_children(settings, port=1234, grpc_port=4321, redis_url="unix:///s")
    for name, value in plan.environment_of(children).items():
        monkeypatch.setenv(name, value)
    assert Settings() == children
    assert children.http_port == 1234
    assert children.grpc_port == 4321
    assert children.drain_s < settings.drain_s
    assert children.metrics_port == 0


def test_programs(tmp_path):
    settings = Settings(home=tmp_path, gateways=2, pools="cpu=2,gpu=1")
    entry = EntryCommands(("g",), ("w",))
    gateways, workers = plan.gateways(settings, 7, 8, entry), plan.workers(settings, entry, 4)
    assert [p.command for p in gateways] == [("g", "--fd", "7", "--preload-fd", "8", "--index", str(i)) for i in (0, 1)]
    assert all(p.fds == (7, 8) and p.signals_ready and not p.worker for p in gateways)
    assert [p.name for p in workers] == ["cpu-0", "cpu-1", "gpu-0"]
    assert workers[0].command == ("w", "--pool", "cpu", "--index", "0", "--device", "cpu", "--threads", "1")
    assert workers[2].command == ("w", "--pool", "gpu", "--index", "0", "--device", "cuda", "--threads", "1")
    own = "gpu=1,device=cuda:1,threads=3,backend=simulated"
    [worker] = plan.workers(Settings(home=tmp_path, pools=own), entry, 1)
    words = ("--pool", "gpu", "--index", "0", "--device", "cuda:1", "--threads", "3", "--backend", "simulated")
    assert worker.command == ("w", *words)
    assert all(p.worker and not p.signals_ready for p in workers)
    assert "secret" not in repr(plan.workers(Settings(admin_key="secret"), entry, 1))


def test_only_segments_with_the_prefix_are_removed(tmp_path):
    for name in ("a.1", "a.2", "a-b.1", "a"):
        (tmp_path / name).touch()
    (tmp_path / "a.metrics").mkdir()
    (tmp_path / "a.metrics" / "file").touch()
    assert remove_segments(tmp_path, "a") == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a-b.1"]
    assert remove_segments(tmp_path / "nowhere", "a") == 0


def test_log_files_are_rotated_and_bounded(tmp_path):
    path = tmp_path / "x.log"
    log = LogFile(path, bytes_max=10)
    for number in range(30):
        log.write(f"line {number:02}\n".encode())
    log.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.log", "x.log.1", "x.log.2", "x.log.3"]
    assert path.read_bytes() == b"line 28\nline 29\n"
    assert (tmp_path / "x.log.1").read_bytes() == b"line 26\nline 27\n"
    again = LogFile(path, bytes_max=10)
    again.write(b"more\n")
    again.close()
    assert path.read_bytes() == b"more\n"
    assert (tmp_path / "x.log.1").read_bytes() == b"line 28\nline 29\n"
    assert len(list(tmp_path.iterdir())) == 4


def test_warnings_and_whole_tracebacks_are_shown():
    lines = [
        ("INFO all is well", False),
        ("2026 WARNING gateway: hm", True),
        ("Traceback (most recent call last):", True),
        ('  File "x.py", line 1, in <module>', True),
        ("", True),
        ("ValueError: no", True),
        ("INFO going on", False),
        ("errors: 0", False),
        ("CRITICAL end", True),
    ]
    alerts = Alerts()
    assert [alerts.line_to_show(line, 0.0) for line, _ in lines] == [line if worth else None for line, worth in lines]


def test_urls():
    assert url_of("::1", 1) == "http://[::1]:1"
    assert local_url_of("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert local_url_of("::", 1) == "http://[::1]:1"
    assert local_url_of("localhost", 1) == "http://localhost:1"


def test_exit_descriptions():
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-9) == "was ended by SIGKILL"
    assert describe_exit(-64) == "was ended by SIGRTMAX"
    assert describe_exit(-99) == "was ended by signal 99"


def _refuses(address: tuple[str, int]) -> None:
    with pytest.raises(Failure) as caught:
        reserve(*address)
    assert caught.value.message == (
        f"port {address[1]} on 127.0.0.1 is in use: stop what uses it, or choose another with --grpc-port"
    )


def test_a_reserved_port_is_only_usable_with_reuseport():
    with reserve("127.0.0.1", 0) as kept:
        address = kept.getsockname()
        _refuses(address)  # another installation whose gateways do not listen yet
        sharing = [socket.socket() for _ in range(2)]
        for one in sharing:
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as the library listens
                one.setsockopt(socket.SOL_SOCKET, option, 1)
            one.bind(address)
            one.listen()
        _refuses(address)
        accepted = []
        for _ in range(20):  # the reservation takes none of them
            with socket.create_connection(address):
                ready = select.select(sharing, [], [], 10)[0]
                accepted.append(ready[0].accept()[0])
        for one in (*accepted, *sharing):
            one.close()
    reserve(*address).close()  # at once, though connections have just ended


@pytest.mark.parametrize(
    ("pools", "pool", "device", "expected"),
    [
        ("gpu=1,device=cuda:0,device_memory=14GiB", "gpu", "cuda:0", 14 << 30),
        ("gpu=1", "gpu", "cuda", 900),
        ("gpu=2,tensorrt=1,cpu=4", "gpu", "cuda", 300),  # those on TensorRT use the same device
        ("gpu=1,other=2,device=cuda:1", "gpu", "cuda", 900),
        ("gpu=1,device_memory=0", "gpu", "cuda", 0),
        ("cpu=1", "started-by-hand", "cuda:0", 900),
    ],
)
def test_workers_on_one_device_share_its_memory(pools: str, pool: str, device: str, expected: int) -> None:
    assert device_budget(pools, pool, device, 1000) == expected
    if "device_memory" not in pools:
        assert device_budget(pools, pool, device, 0) == 0, "what is not known is no limit"


@pytest.mark.parametrize("pools", ["cpu=1,device_memory=8GiB", "gpu=1,device=cpu,device_memory=8GiB"])
def test_a_device_memory_of_a_cpu_is_wrong_usage(pools: str) -> None:
    with pytest.raises(Failure, match=r"device_memory=8GiB: the pool runs on the CPU, .*; memory=8GiB limits"):
        check_device_memory(pools)


@pytest.mark.parametrize("pools", ["gpu=1,device_memory=8GiB", "cpu=1,device=cuda:1,device_memory=8GiB", "gpu=1"])
def test_a_device_memory_of_an_accelerator_is_taken(pools: str) -> None:
    check_device_memory(pools)


def test_a_device_memory_that_is_no_size_is_wrong_usage() -> None:
    with pytest.raises(Failure, match="device_memory=much: write a size like 8GiB"):
        parse_pools("gpu=1,device_memory=much")


def test_a_log_file_that_another_program_moves_is_opened_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("millstream.services.supervisor.log.MOVED_S", 0.0)
    file = LogFile(tmp_path / "a.log")
    file.write(b"1\n")
    (tmp_path / "a.log").rename(tmp_path / "moved")
    file.write(b"2\n")
    (tmp_path / "a.log").unlink()
    file.write(b"3\n")
    assert (tmp_path / "moved").read_bytes() == b"1\n"
    assert (tmp_path / "a.log").read_bytes() == b"3\n"
    (tmp_path / "a.log").rename(tmp_path / "moved")
    tmp_path.rename(tmp_path.with_name("gone"))
    file.write(b"lost\n")
    tmp_path.mkdir()
    file.write(b"4\n")
    assert (tmp_path / "a.log").read_bytes() == b"(1 lines before this one could not be written)\n4\n"
    file.close()
