"""NVIDIA GPUs as the driver's library (NVML) reports them; none if the library is not installed or does not work.

Source: NVML API reference, nvmlDeviceGet… functions. GPUs are the physical ones, as in Triton's metrics: with MIG the
driver reports no utilisation of these.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True)
class Gpu:
    """The state of a GPU. None: the driver does not report it."""

    uuid: str
    utilisation: float | None  # 0 … 1
    power_w: float | None
    power_limit_w: float | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None
    energy_j: float | None


@lru_cache(maxsize=1)
def _pynvml() -> Any:
    """Return the module, or None without a driver: its import takes 4 MB and 14 ms."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return import_module("pynvml")


@lru_cache(maxsize=1)
def _initialize() -> None:
    """Initialise NVML, once until `_shut_down`. Raises NVMLError."""
    _pynvml().nvmlInit()


def close_driver() -> None:
    """Close what NVML has open; the next question opens it again. Never fails."""
    if _initialize.cache_info().currsize:
        _shut_down()


def _shut_down() -> None:
    """Let the next page initialise NVML again: the driver may have been replaced."""
    _initialize.cache_clear()
    nvml = _pynvml()
    with suppress(nvml.NVMLError):
        nvml.nvmlShutdown()


def gpus() -> list[Gpu]:
    """Return the state of all GPUs; never fails."""
    nvml = _pynvml()
    if nvml is None:
        return []
    try:
        _initialize()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError:
        _shut_down()
        return []
    return list(_readable(nvml, count))


@dataclass(frozen=True, slots=True)
class GpuDescription:
    """What a GPU is; "" and 0: unknown."""

    name: str = ""
    memory_bytes: int = 0
    compute_capability: str = ""
    driver: str = ""


def _handle(nvml: Any, which: int | str) -> Any:
    """Return the driver's handle of the GPU with this index or UUID."""
    return nvml.nvmlDeviceGetHandleByIndex(which) if isinstance(which, int) else nvml.nvmlDeviceGetHandleByUUID(which)


def describe_gpu(which: int | str) -> GpuDescription | None:
    """Return what the GPU with this index or UUID is; None if the driver does not know. Never fails."""
    nvml = _pynvml() if find_spec("pynvml") is not None else None
    if nvml is None:
        return None
    try:
        _initialize()
        device = _handle(nvml, which)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
        return GpuDescription(
            nvml.nvmlDeviceGetName(device),
            nvml.nvmlDeviceGetMemoryInfo(device).total,
            f"{major}.{minor}",
            nvml.nvmlSystemGetDriverVersion(),
        )
    except (nvml.NVMLError, UnicodeDecodeError):
        _shut_down()
        return None


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The memory of a GPU that is in use: by each process that the driver names, and by all together."""

    by_process: Mapping[int, int]  # process id, as the driver knows it -> bytes; 0: not counted
    all_bytes: int


def gpu_use(which: int | str) -> GpuUse | None:
    """Return what is in use of the GPU with this index or UUID; None if the driver does not know. Never fails.

    Source: NVML API reference, nvmlDeviceGetComputeRunningProcesses: a process is listed once it has a context.
    """
    nvml = _pynvml() if find_spec("pynvml") is not None else None
    if nvml is None:
        return None
    try:
        _initialize()
        device = _handle(nvml, which)
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(device)
        used = nvml.nvmlDeviceGetMemoryInfo(device).used
        return GpuUse({one.pid: one.usedGpuMemory or 0 for one in processes}, used)
    except nvml.NVMLError:
        _shut_down()
        return None


def _readable(nvml: Any, count: int) -> Iterator[Gpu]:
    """Yield the GPUs that have a handle and a name; without a name, series of two could not be told apart."""
    for index in range(count):
        with suppress(nvml.NVMLError, UnicodeDecodeError):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            yield _gpu(nvml, device, nvml.nvmlDeviceGetUUID(device))


def _gpu(nvml: Any, device: Any, uuid: str) -> Gpu:
    def read(function: Callable[[Any], Any]) -> Any:
        try:
            return function(device)
        except nvml.NVMLError:  # not supported, or the GPU was lost
            return None

    memory = read(nvml.nvmlDeviceGetMemoryInfo)
    use = read(nvml.nvmlDeviceGetUtilizationRates)
    return Gpu(
        uuid,
        None if use is None else use.gpu / 100,
        _thousandths(read(nvml.nvmlDeviceGetPowerUsage)),
        _thousandths(read(nvml.nvmlDeviceGetEnforcedPowerLimit)),
        None if memory is None else memory.total,
        None if memory is None else memory.used,
        _thousandths(read(nvml.nvmlDeviceGetTotalEnergyConsumption)),
    )


def _thousandths(value: int | None) -> float | None:
    """Return milliwatts or millijoules as watts or joules."""
    return None if value is None else value / 1000
