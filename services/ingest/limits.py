"""Limits a process that reads untrusted files, from inside, before it reads them."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

from millstream.services.ingest.report import MESSAGE_CHARACTERS_MAX

_NICE = 10


def limit_process(memory_bytes_max: int, cpu_s_max: int, file_bytes_max: int) -> None:
    """Limit the address space, CPU time and file sizes of this process, and its priority. Raises OSError."""
    os.nice(_NICE)
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes_max),
        (resource.RLIMIT_CPU, cpu_s_max),
        (resource.RLIMIT_FSIZE, file_bytes_max),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    if sys.platform == "linux":
        with suppress(OSError):  # makes the OOM killer choose this process first
            Path("/proc/self/oom_score_adj").write_text("1000")


def one_line(text: str) -> str:
    """Return `text` on one line, printable and bounded: messages quote untrusted names, and are logged."""
    line = " ".join(text.split())[:MESSAGE_CHARACTERS_MAX]
    return "".join(character if character.isprintable() else "?" for character in line)
