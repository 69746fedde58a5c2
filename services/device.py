"""What a worker runs on: its processors and their features, or its GPU, with a fingerprint for compiled variants.

/proc/cpuinfo, control groups, NVML ─> find_device ─> DeviceRecord, which the worker publishes
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection
from contextlib import suppress
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

from millstream.services.environment import visible_gpus
from millstream.services.metrics.gpus import GpuDescription, describe_gpu, gpu_use
from millstream.services.process.machine_share import cpu_share, total_bytes
from millstream.services.wire.records import DeviceRecord

CPUINFO = Path("/proc/cpuinfo")
#: flags of /proc/cpuinfo that inference libraries choose their kernels by: x86 first, then Arm
FEATURES = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8",
    "amx_bf16", "asimd", "asimddp", "asimdhp", "sve", "sve2", "i8mm", "bf16",
)  # fmt: skip
#: packages of inference libraries and compilers, whose versions workers publish if they are installed
PACKAGES = (
    *("onnxruntime", "onnxruntime-gpu", "openvino", "torch", "jax", "jaxlib", "iree-base-runtime"),
    *("iree-base-compiler", "tensorrt", "tritonclient", "onnx", "nncf", "apache-tvm"),
)
_NAME = re.compile(r"^(?:model name|Model)\s*:\s*(.+)$", re.MULTILINE)
_FLAGS = re.compile(r"^(?:flags|Features)\s*:\s*(.+)$", re.MULTILINE)


def find_device(device: str, cpuinfo: Path = CPUINFO) -> DeviceRecord:
    """Return what `device` ("cpu", "cuda:0", "tensorrt") is; never fails."""
    kind, _, number = device.partition(":")
    text = ""
    with suppress(OSError):
        text = cpuinfo.read_text(errors="replace")
    features = _features(text)
    processor = name.group(1).strip() if (name := _NAME.search(text)) else platform.machine()
    cores, memory_bytes = cpu_share(), total_bytes()
    if kind == "cpu":
        print_of = fingerprint("cpu", processor, *features)
        return DeviceRecord(
            kind="cpu", name=processor, memory_bytes=memory_bytes, cores=cores, features=features, fingerprint=print_of
        )
    gpu = describe_gpu(visible_gpu(int(number or 0), visible_gpus())) or GpuDescription()
    return DeviceRecord(
        kind="gpu",
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        cores=cores,
        features=features,
        compute_capability=gpu.compute_capability,
        driver=gpu.driver,
        fingerprint=fingerprint("gpu", gpu.name, gpu.compute_capability, str(gpu.memory_bytes)),
    )


class GpuMemory:
    """What this process uses of the memory of a GPU.

    In a container without the host's process ids the driver does not know this process by its id. Then it is the growth
    of what all processes use.

    Args:
        device: like "cuda:0".
    """

    def __init__(self, device: str) -> None:
        self._which = visible_gpu(int(device.partition(":")[2] or 0), visible_gpus())
        use = gpu_use(self._which)
        self._before = use.all_bytes if use is not None else 0

    def used_bytes(self) -> int:
        """Return the bytes; 0: none, or the driver does not know."""
        use = gpu_use(self._which)
        if use is None:
            return 0
        if own := use.by_process.get(os.getpid()):
            return own
        if all(Path(f"/proc/{pid}").exists() for pid in use.by_process):
            return 0  # ids are those of this machine: this process has no context yet
        return max(0, use.all_bytes - self._before)


def fingerprint(*parts: str) -> str:
    """Return 12 hexadecimal digits that are equal on equal devices, in every process and after every restart.

    Versions of drivers and libraries are no part: artifacts that depend on them name these themselves.
    """
    return blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


def visible_gpu(number: int, visible: str | None) -> int | str:
    """Return the driver's index, or the UUID, of the CUDA device `number`.

    `visible` is CUDA_VISIBLE_DEVICES: indices or UUIDs, separated by commas; None: all GPUs. Source: CUDA C++
    Programming Guide, "CUDA environment variables".
    """
    names = [name.strip() for name in visible.split(",")] if visible else []
    if number >= len(names):
        return number
    return int(names[number]) if names[number].isdecimal() else names[number]


def installed_packages() -> dict[str, str]:
    """Return the versions of the inference libraries that are installed."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def missing_for(backend: str, device: str, found: DeviceRecord, packages: Collection[str]) -> str:
    """Return what a worker lacks to run models on its GPU; "" if nothing is known to be missing, or it has none.

    Args:
        backend: that of the worker.
        device: of the worker, like "cuda:0".
        found: what the device is.
        packages: inference libraries that are installed.
    """
    if found.kind != "gpu" or backend != "onnxruntime":
        return ""
    if "onnxruntime-gpu" not in packages:
        return f"device {device} needs onnxruntime-gpu: install millstream[gpu] in place of millstream[cpu]"
    return "" if found.name else f"the NVIDIA driver knows no GPU that is {device}"


def _features(text: str) -> tuple[str, ...]:
    """Return those flags of the first processor that FEATURES names."""
    found = _FLAGS.search(text)
    flags = set(found.group(1).split()) if found else set()
    return tuple(feature for feature in FEATURES if feature in flags)
