"""How much memory a process takes, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20


def resident_bytes(pid: int) -> int:
    """What is in memory now."""
    return _status(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """The most that was in memory since the last `forget_peak`, or ever."""
    return _status(pid, "VmHWM")


def forget_peak(pid: int) -> None:
    """Begin to look for the peak anew (proc(5), clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
