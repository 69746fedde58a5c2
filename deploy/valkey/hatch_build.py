"""Builds a wheel for one platform: its version is that of the server, its tag that of the machine and its C library."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SERVER = Path(__file__).parent / "valkey_for_millstream" / "valkey-server"


def version() -> str:
    """Return the version that the server prints."""
    printed = subprocess.run([SERVER, "--version"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\bv=(\d+\.\d+\.\d+)", printed)[0]


class Hook(BuildHookInterface[Any]):
    """Names the platform of the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library, number = platform.libc_ver()
        if library != "glibc":
            raise RuntimeError("build on the oldest Linux with glibc that the wheel is for")
        tag = f"manylinux_{number.replace('.', '_')}_{platform.machine()}"
        build_data |= {"pure_python": False, "tag": f"py3-none-{tag}"}
