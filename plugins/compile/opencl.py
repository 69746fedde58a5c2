"""OpenCL platforms and their devices, through the system's loader: no package is needed.

python -m millstream.plugins.compile.opencl: prints them as JSON. It is a process of its own, since the loader runs
the vendors' libraries. Source: OpenCL 3.0 API specification, 4.1 "Querying Platform Info"; cl_khr_icd.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from millstream.plugins.compile.targets.refused import OPENCL_VENDORS

LOADER = "libOpenCL.so.1"
QUERY_S_MAX = 10.0
PLATFORMS_MAX, DEVICES_MAX = 16, 64
_NAME_BYTES = 1024
_PLATFORM_NAME, _DEVICE_NAME = 0x0902, 0x102B
_ALL_DEVICES = 0xFFFFFFFF


class OpenClPlatform(BaseModel):
    """A platform: a vendor's implementation, and the names of its devices."""

    name: str
    devices: tuple[str, ...] = ()


def vendor_files(folder: Path = OPENCL_VENDORS) -> list[str]:
    """Return the names of the files by which vendors register their libraries; empty: there is no OpenCL here."""
    try:
        return sorted(path.name for path in folder.glob("*.icd"))
    except OSError:
        return []


def find_platforms() -> list[OpenClPlatform]:
    """Return the platforms; empty if there is none, or the loader or a vendor's library does not work."""
    if not vendor_files():
        return []
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__], capture_output=True, check=False, timeout=QUERY_S_MAX
        )
        return TypeAdapter(list[OpenClPlatform]).validate_json(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValidationError):
        return []


def query(loader: Any) -> list[dict[str, Any]]:
    """Return what `loader`, the OpenCL library, reports."""
    found = []
    for platform in _handles(loader.clGetPlatformIDs):
        devices = _handles(
            lambda number, handles, count, at=platform: loader.clGetDeviceIDs(
                ctypes.c_void_p(at), ctypes.c_ulong(_ALL_DEVICES), number, handles, count
            ),
            DEVICES_MAX,
        )
        names = [_text(loader.clGetDeviceInfo, device, _DEVICE_NAME) for device in devices]
        found.append({"name": _text(loader.clGetPlatformInfo, platform, _PLATFORM_NAME), "devices": names})
    return found


def _handles(ask: Callable[..., int], most: int = PLATFORMS_MAX) -> list[int]:
    handles, count = (ctypes.c_void_p * most)(), ctypes.c_uint(0)
    if ask(ctypes.c_uint(most), handles, ctypes.byref(count)):
        return []
    return [handle for handle in handles[: min(most, count.value)] if handle]


def _text(ask: Callable[..., int], handle: int, which: int) -> str:
    text = ctypes.create_string_buffer(_NAME_BYTES)
    if ask(ctypes.c_void_p(handle), ctypes.c_uint(which), ctypes.c_size_t(_NAME_BYTES), text, None):
        return "unknown"
    return text.value.decode(errors="replace").strip()


if __name__ == "__main__":
    print(json.dumps(query(ctypes.CDLL(LOADER))))
