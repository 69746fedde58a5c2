"""A process of a release that has one more format of batches and replies than this one: newer.py MODULE
[ARGUMENTS...]
"""

from __future__ import annotations

import runpy
import sys
from functools import partial
from importlib import import_module

from millstream.services.wire import batch

NEXT = batch.BATCH_FORMATS[-1] + 1
batch.BATCH_FORMATS = (*batch.BATCH_FORMATS, NEXT)
batch.REPLY_FORMATS = (*batch.REPLY_FORMATS, NEXT)
packer = import_module("millstream.gateway.scheduling.packer")
vars(packer)["BatchHeader"] = partial(batch.BatchHeader, reply_formats=batch.REPLY_FORMATS)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
