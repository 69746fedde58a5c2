"""Reads the memory of a process from the kernel."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return _status(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """Return the peak of the resident memory since the last `forget_peak`, or since the start."""
    return _status(pid, "VmHWM")


def forget_peak(pid: int) -> None:
    """Reset the peak of the resident memory (proc(5), clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
