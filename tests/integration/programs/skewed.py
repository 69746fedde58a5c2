"""A process of the product on a machine whose clock is wrong: skewed.py SECONDS MODULE [ARGUMENTS...]

The wall clock of the process is so many seconds ahead; the monotonic clock cannot be set.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable

ahead_s = float(sys.argv[1])
right: Callable[[], float] = time.time
right_ns: Callable[[], int] = time.time_ns
time.time = lambda: right() + ahead_s
time.time_ns = lambda: right_ns() + round(ahead_s * 1e9)
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
