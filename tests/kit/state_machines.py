"""Settings of the state machines: tests try the same examples in every run, `make explore` tries others."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

#: set by tests/explore: examples of each machine come from the seed of the run
EXPLORE = "STATE_MACHINES_EXPLORE"


def machine_settings(**options: Any) -> settings:
    """Settings of one machine. `options`: as for hypothesis.settings."""
    if os.environ.get(EXPLORE):
        # Where CI is set, Hypothesis turns derandomize on by itself, and would ignore the seed.
        return settings(**options, deadline=None, database=None, print_blob=False, derandomize=False)
    return settings(**options, deadline=None, derandomize=True)
