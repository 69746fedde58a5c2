"""Limits the memory of a worker: beyond the limit an allocation fails, which fails one run or load, not the machine.

RLIMIT_DATA is used, not RLIMIT_AS: since Linux 4.7 it counts private writable memory, however it was mapped
(getrlimit(2)). It does not count the gateways' shared memory, files mapped read-only, and reserved address space, of
which GPU libraries take a hundred times the memory that they use. The budget counts resident memory, with mapped files
and without the stacks that threads reserve and do not use, so the limit is corrected by these.
"""

from __future__ import annotations

import ctypes
import logging
import resource
import threading
from pathlib import Path

from millstream.services.process.memory_use import memory_use

log = logging.getLogger("millstream.memory")

#: As on Windows; with the default of 8 MiB the stacks of 1,000 models would reserve more than most machines have.
LIBRARY_STACK_BYTES = 1 << 20
STACK_BYTES_DEFAULT = 8 << 20  # where the size of stacks is not limited
STACK_CACHE_BYTES = 40 << 20  # stacks of ended threads that glibc keeps
STACK_USED_BYTES = 16 << 10  # which a thread uses at least
_ATTRIBUTES_BYTES = 64  # of pthread_attr_t: 56 on x86-64, 64 on AArch64
OOM_SCORE = 500  # added to the kernel's own score, which is at most 1000


class MemoryLimit:
    """The limit of this process. Allocations fail where the budget would be exceeded.

    Args:
        budget_bytes: memory that the process may use, the interpreter included; 0: no limit.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._python_stack_bytes = _stack_bytes()
        use = memory_use()
        self._unused = max(0, use.data - use.anonymous - threading.active_count() * self._python_stack_bytes)
        self._most = 0  # threads of Python at once
        if budget_bytes:
            threading.stack_size(self._python_stack_bytes)  # the default of today, also after the next line
            _set_library_stacks(LIBRARY_STACK_BYTES)
        self.follow()

    def follow(self) -> None:
        """Set the limit for the threads and mapped files that there are now. Takes about 20 us."""
        if not self._budget_bytes:
            return
        use, python = memory_use(), threading.active_count()
        self._most = max(self._most, python)
        ended = min(STACK_CACHE_BYTES, (self._most - python) * self._python_stack_bytes)
        stacks = python * self._python_stack_bytes + max(0, use.threads - python) * LIBRARY_STACK_BYTES + ended
        stacks -= use.threads * STACK_USED_BYTES
        limit = max(0, self._budget_bytes - use.file) + self._unused + stacks
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _stack_bytes() -> int:
    """Return the address space that the C library reserves for the stack of a thread (pthread_create(3))."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return STACK_BYTES_DEFAULT if soft == resource.RLIM_INFINITY else max(soft, LIBRARY_STACK_BYTES)


def _set_library_stacks(size_bytes: int) -> None:
    """Set the stack of threads that libraries start, of which every loaded model has some. glibc only."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "pthread_setattr_default_np"):
        return
    attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
    library.pthread_attr_init(attributes)
    library.pthread_attr_setstacksize(attributes, ctypes.c_size_t(size_bytes))
    library.pthread_setattr_default_np(attributes)
    library.pthread_attr_destroy(attributes)


def prefer_for_oom_kill() -> None:
    """Let the kernel's out-of-memory killer choose this process before gateways, Redis and the supervisor."""
    score = Path("/proc/self/oom_score_adj")
    try:
        score.write_text(str(min(1000, int(score.read_text()) + OOM_SCORE)))
    except (OSError, ValueError) as error:
        log.debug("the score of the out-of-memory killer cannot be set: %s", error)
