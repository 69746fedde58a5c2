"""What a worker runs on: processors and quotas from files as the kernel writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millstream.services.device import find_device, fingerprint, installed_packages, missing_for, visible_gpu
from millstream.services.process.machine_share import cpu_share, cpus
from millstream.services.wire.records import DeviceRecord

X86 = """processor\t: 0
model name\t: Example CPU @ 2.60GHz
flags\t\t: fpu sse avx avx2 fma avx512f avx512_vnni avx512_bf16 amx_tile amx_int8

processor\t: 1
model name\t: Example CPU @ 2.60GHz
flags\t\t: fpu
"""
HALF_V1 = {"cpu__cfs_quota_us": "50000", "cpu__cfs_period_us": "100000"}
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp bf16 i8mm\n"


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("group", "own", "files", "share"),
    [
        ("", "0::/\n", {"cpu__max": "50000 100000\n"}, 0.5),
        ("a/b", "0::/a/b\n", {"cpu__max": "150000 100000\n"}, 1.5),
        ("a", "0::/a/b\n", {"cpu__max": "100000 100000\n"}, 1.0),  # of the parent
        ("", "0::/not/in/this/view\n", {"cpu__max": "100000 100000\n"}, 1.0),
        ("cpu/a", "3:cpu,cpuacct:/a\n1:name=systemd:/\n", HALF_V1, 0.5),
        ("cpu,cpuacct", "3:cpu,cpuacct:/\n", HALF_V1, 0.5),
        ("cpu", "3:cpu:/\n", HALF_V1 | {"cpu__cfs_quota_us": "-1"}, None),
        ("", "0::/\n", {"cpu__max": "max 100000\n"}, None),
        ("", "0::/\n", {"cpu__max": "unreadable\n"}, None),
        ("", "0::/\n", {}, None),
    ],
)  # fmt: skip
def test_the_share_of_the_processors_is_the_smallest_quota(tmp_path, group, own, files, share):
    write(tmp_path / "groups" / group, **files)
    write(tmp_path, own=own)
    everything = len(os.sched_getaffinity(0))
    assert cpu_share(tmp_path / "groups", tmp_path / "own") == min(everything, share or everything)
    assert cpus(tmp_path / "groups", tmp_path / "own") == max(1, int(min(everything, share or everything)))
    assert cpu_share(tmp_path / "groups", tmp_path / "nowhere") <= everything


def test_a_processor_and_its_features(tmp_path):
    write(tmp_path, x86=X86, arm=ARM, less=X86.replace(" amx_int8", ""))
    device = find_device("cpu", tmp_path / "x86")
    assert (device.kind, device.name) == ("cpu", "Example CPU @ 2.60GHz")
    assert device.features == ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8")
    assert device.cores > 0
    assert device.memory_bytes > 0
    assert find_device("cpu", tmp_path / "arm").features == ("asimd", "asimddp", "i8mm", "bf16")
    prints = {find_device("cpu", tmp_path / name).fingerprint for name in ("x86", "arm", "less", "nowhere")}
    assert len(prints) == 4
    assert device.fingerprint == find_device("cpu", tmp_path / "x86").fingerprint
    assert len(device.fingerprint) == 12


def test_a_fingerprint_stays_the_same_between_releases():
    assert fingerprint("gpu", "Test GPU 1", "9.0", str(80 << 30)) == "a369890c1a8f"


def test_the_numbers_of_cuda_are_those_of_its_visible_devices():
    assert [visible_gpu(number, None) for number in (0, 3)] == [0, 3]
    assert [visible_gpu(number, "2, 0") for number in (0, 1, 2)] == [2, 0, 2]
    assert visible_gpu(0, "GPU-5a1,GPU-77") == "GPU-5a1"


def test_installed_libraries_have_versions():
    assert installed_packages()["onnxruntime"][0].isdecimal()


@pytest.mark.parametrize(
    ("backend", "kind", "name", "packages", "missing"),
    [
        ("onnxruntime", "cpu", "", ["onnxruntime"], ""),
        ("onnxruntime", "gpu", "H100", ["onnxruntime-gpu"], ""),
        ("onnxruntime", "gpu", "H100", ["onnxruntime"], "needs onnxruntime-gpu: install millstream[gpu]"),
        ("onnxruntime", "gpu", "", ["onnxruntime-gpu"], "the NVIDIA driver knows no GPU that is cuda:1"),
        ("simulated", "gpu", "", [], ""),
    ],
)
def test_what_a_worker_lacks_to_use_its_gpu(backend, kind, name, packages, missing):
    found = missing_for(backend, "cuda:1", DeviceRecord(kind=kind, name=name), packages)
    assert missing in found
    assert bool(found) == bool(missing)
