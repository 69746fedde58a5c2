"""Why a candidate has its verdict, in one sentence of the report. Pure."""

from __future__ import annotations

import math

from millstream.plugins.compile.race.choice import ROUNDS_MIN, Choice
from millstream.plugins.compile.race.schedule import COMPILE_PARTS, ENTRY_SHARE


def not_compiled(seconds: float) -> str:
    """Of a candidate that the budget did not reach."""
    return f"the budget of {seconds:g} s ended before it was compiled: allow more seconds, or name targets"


def not_measured(seconds: float) -> str:
    """Of a candidate that was compiled when the budget ended."""
    return f"the budget of {seconds:g} s ended before it was measured"


def compiled_late(why: str, seconds: float, key: str) -> str:
    """Of a candidate whose compilation was ended for its time; `why` says how long it took."""
    more = math.ceil(seconds * COMPILE_PARTS)
    return f"{why}, its part of the budget: allow more seconds (--race-seconds {more}), or --targets {key}"


def compiles_too_long(expected_s: float, late_s: float, seconds: float, key: str) -> str:
    """Of a candidate whose compilation was not begun for the time that it is expected to take.

    Args:
        expected_s: by earlier races, or by `late_s`.
        late_s: limit that another candidate of its target did not meet; 0: there is none.
        seconds: of the budget.
        key: of the candidate.
    """
    more = math.ceil(max(seconds, COMPILE_PARTS * expected_s / ENTRY_SHARE))
    why = f"by earlier races it takes {expected_s:.3g} s to compile"
    if late_s:
        why = f"another candidate of its target took longer than {late_s:.3g} s to compile"
    return f"{why}, more than the budget has left: allow more seconds (--race-seconds {more}), or --targets {key}"


def unjudged(rounds: int, choice: Choice, seconds: float) -> dict[str, str]:
    """Return verdict and reason of a candidate whose answers were not judged."""
    if choice.winner is not None:
        why = f"slower than others after {_counted(rounds)}; its answers were not judged"
        return {"verdict": "lost", "why": why}
    why = f"the budget of {seconds:g} s ended before it was judged (--race-seconds {math.ceil(seconds * 2)})"
    return {"verdict": "skipped", "why": why}


def lost(rounds: int, choice: Choice, *, dropped: bool) -> str:
    """Of a candidate with right answers. `dropped`: before the final."""
    if dropped:
        return f"slower than others after {_counted(rounds)}"
    if rounds < ROUNDS_MIN:
        return f"the budget ended after {_counted(rounds)}"
    return "gains less than 5 %" if choice.winner is None else f"gains less than {choice.winner}"


def _counted(rounds: int) -> str:
    return "1 round" if rounds == 1 else f"{rounds} rounds"
