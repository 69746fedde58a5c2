"""The result of one check of `millstream doctor`."""

from __future__ import annotations

from typing import Literal, NamedTuple

State = Literal["ok", "warn", "fail"]


class Check(NamedTuple):
    """The result of one check. State "fail": Millstream does not work. `advice`: what to do; may be empty."""

    name: str
    state: State
    detail: str
    advice: str = ""
