"""Runs a procedure of the client without a server: a script answers its calls, and a clock of its own moves."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from millstream.client.call import NO_REPLY, Call, Pause, Reply, Steps
from millstream.client.retry import Budget, Retries, with_retries
from millstream.services.errors import Failure

T = TypeVar("T")
Answer = Reply | Failure


def reply(document: Any = None, status: int = 200, **headers: str) -> Reply:
    """Return a reply with a JSON document; underscores in the names of headers are dashes."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, names, bytearray(json.dumps(document if document is not None else {}).encode()), "http://test")


def refusal(status: int, message: str = "no", **headers: str) -> Reply:
    return reply({"error": message}, status, **headers)


class Script:
    """Answers calls in order. `calls` and `pauses` are what the procedure did; `now` is its clock.

    Args:
        answers: replies, or failures of the transport; the last one is repeated.
        call_s: seconds that each call takes.
    """

    def __init__(self, *answers: Answer, call_s: float = 0.0) -> None:
        self.answers = list(answers)
        self.call_s = call_s
        self.calls: list[Call] = []
        self.pauses: list[float] = []
        self.logged: list[str] = []
        self.now = 1000.0

    def budget(self, timeout_s: float | None) -> Budget:
        return Budget(timeout_s, lambda: self.now)

    def run(
        self,
        steps: Steps[T] | Callable[[Budget], Steps[T]],
        *,
        timeout_s: float | None = 60.0,
        attempts: int = 5,
        random: float = 0.0,
    ) -> T:
        """Run a procedure, or one that is made for the budget; return its result. Raises what it raises."""
        budget = self.budget(timeout_s)
        made = steps(budget) if callable(steps) else steps
        running = with_retries(made, Retries(attempts, lambda: random), budget)
        try:
            step = next(running)
            while True:
                if isinstance(step, Pause):
                    self.pauses.append(step.seconds)
                    self.logged += [step.why] if step.why else []
                    self.now += step.seconds
                    step = running.send(NO_REPLY)
                    continue
                self.calls.append(step)
                self.now += self.call_s
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                step = running.throw(answer) if isinstance(answer, Failure) else running.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    @property
    def sent(self) -> list[tuple[str, str]]:
        """Method and path of each call."""
        return [(call.method, call.path) for call in self.calls]
