"""A process of a release that has one more format of batches and replies than this one: newer.py MODULE
[ARGUMENTS...]
"""

from __future__ import annotations

import runpy
import sys

from millstream.services.wire import batch

NEXT = batch.BATCH_FORMATS[-1] + 1
batch.BATCH_FORMATS = (*batch.BATCH_FORMATS, NEXT)
batch.REPLY_FORMATS = (*batch.REPLY_FORMATS, NEXT)
defaults = batch.BatchHeader.__new__.__defaults__
assert defaults is not None
batch.BatchHeader.__new__.__defaults__ = (*defaults[:-1], batch.REPLY_FORMATS)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
