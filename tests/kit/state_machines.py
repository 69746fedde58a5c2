"""Settings of the state machines: tests use the same examples in every run, `make explore` uses random ones."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

#: set by tests/explore: the seed of the run determines the examples of each machine
EXPLORE = "STATE_MACHINES_EXPLORE"


def machine_settings(**options: Any) -> settings:
    """Return the settings of one machine; `options` are those of hypothesis.settings."""
    if os.environ.get(EXPLORE):
        # Where CI is set, Hypothesis turns derandomize on by itself, and would ignore the seed.
        return settings(**options, deadline=None, database=None, print_blob=False, derandomize=False)
    return settings(**options, deadline=None, derandomize=True)
