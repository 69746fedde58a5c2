"""NVIDIA GPUs as the driver's library (NVML) reports them; none if the library is not installed.

Source: NVML API reference, nvmlDeviceGet… functions; each returns 0 for success.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

_UUID_BYTES = 96


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


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


def gpus() -> list[Gpu]:
    """Return the state of all GPUs."""
    nvml = _library()
    count = ctypes.c_uint()
    if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    readable: list[Gpu] = []
    for index in range(count.value):
        device = ctypes.c_void_p()
        if not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            readable.append(_gpu(nvml, device))
    return readable


def _gpu(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> Gpu:
    uuid = ctypes.create_string_buffer(_UUID_BYTES)
    nvml.nvmlDeviceGetUUID(device, uuid, _UUID_BYTES)
    memory, use = _Memory(), _Utilisation()
    known = not nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    used = not nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(use))
    return Gpu(
        uuid.value.decode(errors="replace"),
        use.gpu / 100 if used else None,
        _thousandths(nvml.nvmlDeviceGetPowerUsage, device, ctypes.c_uint()),
        _thousandths(nvml.nvmlDeviceGetEnforcedPowerLimit, device, ctypes.c_uint()),
        memory.total if known else None,
        memory.used if known else None,
        _thousandths(nvml.nvmlDeviceGetTotalEnergyConsumption, device, ctypes.c_ulonglong()),
    )


def _thousandths(read: object, device: ctypes.c_void_p, value: ctypes.c_uint | ctypes.c_ulonglong) -> float | None:
    """Call a function of NVML that returns milliwatts or millijoules; returns watts or joules, None if it fails."""
    assert callable(read)
    return None if read(device, ctypes.byref(value)) else value.value / 1000
