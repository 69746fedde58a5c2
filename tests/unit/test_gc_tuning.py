"""A process that ends does not look for garbage first."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from millstream.services.process.gc_tuning import exit_without_gc
{call}
class Node:
    def __del__(self, write=__import__("os").write):
        write(1, b"collected")
gc.set_threshold(1_000_000)
node = Node()
node.node = node
del node
"""


def output(call: str) -> str:
    return subprocess.check_output([sys.executable, "-c", PROGRAM.format(call=call)], text=True)


def test_garbage_is_not_collected_at_the_end() -> None:
    assert output("") == "collected"
    assert output("exit_without_gc()") == ""
