"""GPUs as a driver library reports them, in a process of its own; the library is compiled from tests/kit/nvml.c."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from millstream.services.environment import child_environment
from millstream.services.metrics.gpus import gpus

SOURCE = Path(__file__).parents[1] / "kit" / "nvml.c"
PROGRAM = """
import dataclasses, orjson
from millstream.services.metrics.gpus import gpus
print(orjson.dumps([[dataclasses.asdict(gpu) for gpu in gpus()] for _ in range(3)]).decode())
"""
FIRST = {
    "uuid": "GPU-1",
    "utilisation": 0.5,
    "power_w": 70.5,
    "power_limit_w": 700.0,
    "memory_total_bytes": 80 << 30,
    "memory_used_bytes": 8 << 30,
    "energy_j": 2**40 / 1000,
}
SECOND = FIRST | {"uuid": "GPU-2"}


def compiled(folder: Path, *options: str) -> Path:
    command = ["gcc", "-shared", "-fPIC", *options, "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)]
    subprocess.run(command, check=True, timeout=240)
    return folder


def reported(folder: Path, **environment: str) -> list[list[dict[str, Any]]]:
    """What three calls of `gpus` return in a new process."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=child_environment({"LD_LIBRARY_PATH": str(folder), **environment}),
        capture_output=True,
        check=True,
        timeout=240,
    )
    assert not result.stderr
    pages: list[list[dict[str, Any]]] = orjson.loads(result.stdout)
    return pages


def test_without_a_driver_there_are_none_and_pynvml_is_not_imported(tmp_path: Path) -> None:
    program = "from millstream.services.metrics.gpus import gpus; import sys; print(gpus(), 'pynvml' in sys.modules)"
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no library")
    environment = child_environment({"LD_LIBRARY_PATH": str(tmp_path)})
    output = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True, timeout=240)
    assert output == "[] False\n"


@pytest.mark.needs("gcc")
def test_two_gpus(tmp_path: Path) -> None:
    assert reported(compiled(tmp_path)) == [[FIRST, SECOND]] * 3


@pytest.mark.needs("gcc")
@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ("use", [{"utilisation": None}] * 2),  # MIG
        ("energy", [{"energy_j": None}] * 2),  # before Volta
        ("memory", [{"memory_total_bytes": None, "memory_used_bytes": None}] * 2),
        ("power,limit", [{"power_w": None, "power_limit_w": None}] * 2),
        ("second", [{}]),  # it was lost
        ("uuid", []),
        ("text", []),
        ("count", []),
        ("init", []),  # the driver is not loaded
    ],
)
def test_what_the_driver_does_not_report_is_left_out(
    tmp_path: Path, failing: str, expected: list[dict[str, None]]
) -> None:
    page = [gpu | changes for gpu, changes in zip((FIRST, SECOND), expected, strict=False)]
    assert reported(compiled(tmp_path), FAIL=f"{failing},") == [page] * 3


@pytest.mark.needs("gcc")
def test_an_old_driver_without_a_function(tmp_path: Path) -> None:
    page = [FIRST | {"energy_j": None}, SECOND | {"energy_j": None}]
    assert reported(compiled(tmp_path, "-DOLD")) == [page] * 3


@pytest.mark.needs("gcc")
def test_a_driver_that_fails_later_is_initialised_again(tmp_path: Path) -> None:
    assert reported(compiled(tmp_path), LOST_AFTER="1") == [[FIRST, SECOND], [], [FIRST, SECOND]]


@pytest.mark.gpu
def test_the_gpus_of_this_machine() -> None:
    assert all(gpu.uuid.startswith("GPU-") and gpu.memory_total_bytes for gpu in gpus())


DEVICE = """
import sys
from millstream.services.device import find_device
print(find_device(sys.argv[1]).model_dump_json())
"""


def device(folder: Path, name: str, **environment: str) -> dict[str, Any]:
    """What a worker on the device `name` finds out, in a process of its own."""
    output = subprocess.check_output(
        [sys.executable, "-c", DEVICE, name],
        env=child_environment({"LD_LIBRARY_PATH": str(folder), **environment}),
        timeout=240,
    )
    found: dict[str, Any] = orjson.loads(output)
    return found


@pytest.mark.needs("gcc")
def test_a_worker_on_a_gpu_finds_out_what_it_is(tmp_path: Path) -> None:
    library = compiled(tmp_path)
    first = device(library, "cuda")
    assert (first["kind"], first["name"], first["memory_bytes"]) == ("gpu", "Test GPU 1", 80 << 30)
    assert (first["compute_capability"], first["driver"]) == ("9.0", "580.1")
    assert device(library, "tensorrt:1")["name"] == "Test GPU 2"
    assert device(library, "cuda:0", CUDA_VISIBLE_DEVICES="1")["name"] == "Test GPU 2"
    assert device(library, "cuda:0", CUDA_VISIBLE_DEVICES="GPU-2,GPU-1")["name"] == "Test GPU 2"
    assert device(library, "cuda")["fingerprint"] == first["fingerprint"]
    unknown = device(library, "cuda", FAIL="capability,")
    assert (unknown["kind"], unknown["name"]) == ("gpu", "")


USED = """
from millstream.services.device import GpuMemory
memory = GpuMemory("cuda:0")
print(memory.used_bytes())
"""


@pytest.mark.needs("gcc")
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PROCESSES": f"self:{5 << 20}"}, 5 << 20),
        ({"PROCESSES": f"1:{5 << 20}", "GROWTH": "1000"}, 0),  # another process of this machine
        ({"PROCESSES": f"4000000000:{5 << 20}", "GROWTH": "1000"}, 1000),  # as in a container: ids of another machine
        ({"PROCESSES": "4000000000", "GROWTH": "1000"}, 1000),
        ({"GROWTH": "1000"}, 0),  # nothing runs on it
        ({"FAIL": "memory,"}, 0),
        ({"FAIL": "processes,"}, 0),
        ({"FAIL": "init,"}, 0),
    ],
)
def test_memory_of_a_gpu_that_this_process_uses(tmp_path: Path, environment: dict[str, str], expected: int) -> None:
    variables = child_environment({"LD_LIBRARY_PATH": str(compiled(tmp_path)), **environment})
    output = subprocess.check_output([sys.executable, "-c", USED], env=variables, text=True, timeout=240)
    assert int(output) == expected
