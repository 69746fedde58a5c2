"""Reads CPU seconds and memory of a tree of processes from /proc, and sets the cores that it may run on."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from millstream.services.supervisor.plan import EntryCommands
from tests.bench.errors import LoadError

#: modules that the supervisor starts
GATEWAY, WORKER = EntryCommands().gateway[-1], EntryCommands().worker[-1]
PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Memory:
    """Bytes of one process: resident, and proportional (pages shared with others counted in parts)."""

    rss_bytes: int
    pss_bytes: int


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process is gone. Source: proc(5)."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def tree(root: int) -> set[int]:
    """Return the pids of `root` and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = set(), [root]
    while todo:
        pid = todo.pop()
        found.add(pid)
        todo += children.get(pid, [])
    return found


def cpu_s(root: int) -> float:
    """Return the user and system seconds used so far by `root` and its current descendants."""
    ticks = sum(int(fields[11]) + int(fields[12]) for pid in tree(root) if (fields := _stat(pid)))
    return ticks / TICKS_PER_S


def process_cpu_s(pid: int) -> float:
    """Return the user and system seconds used so far by one process; 0 if it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def memory(pid: int) -> Memory:
    """Return the memory of one process. Source: proc(5), smaps_rollup."""
    text = (PROC / str(pid) / "smaps_rollup").read_text()
    kib = {name: int(size) for name, size in re.findall(r"^(Rss|Pss):\s+(\d+) kB", text, re.MULTILINE)}
    return Memory(rss_bytes=kib["Rss"] * 1024, pss_bytes=kib["Pss"] * 1024)


def running_module(root: int, module: str) -> list[int]:
    """Return the pids of descendants of `root` that run `python -m module`, oldest first. Raises LoadError for none."""
    found = []
    for pid in sorted(tree(root)):
        try:
            words = (PROC / str(pid) / "cmdline").read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if any(pair == ("-m", module) for pair in pairwise(words)):
            found.append(pid)
    if not found:
        raise LoadError(f"no process runs `python -m {module}`")
    return found


def pin(root: int, cores: set[int]) -> None:
    """Pin all threads of `root` and its descendants to `cores`; threads that they start later inherit it."""
    for pid in tree(root):
        for thread in (PROC / str(pid) / "task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)
