"""asking: what adapters that are coroutines do between a body and a reply, beside their own reading and writing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from gateway.arrays import Inputs, owned
from gateway.caller import TERMS, Caller, Terms
from gateway.lanes import Route
from gateway.outputs import OutputTensor
from services.errors import Failure

P = ParamSpec("P")
T = TypeVar("T")

#: from so many bytes on, reading or writing them would keep the event loop's other requests waiting
APART_BYTES_MIN = 64 * 1024
#: numbers as Python's objects are many times as large as their text: more at once would cost memory and gain no time
APART_AT_ONCE_MAX = 2

_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def apart(size_bytes: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(…)`, in a thread if it is about many bytes."""
    if size_bytes < APART_BYTES_MIN:
        return work(*args, **kwargs)
    slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(APART_AT_ONCE_MAX))
    async with slots:
        return await asyncio.to_thread(work, *args, **kwargs)


@contextmanager
def turning_away(route: Route) -> Iterator[None]:
    """What is refused in the block counts as a refused request of the route's version."""
    try:
        yield
    except Failure as failure:
        route.lane.turned_away(failure.code)
        raise


async def ask(caller: Caller, route: Route, inputs: Inputs, terms: Terms = TERMS) -> list[OutputTensor]:
    """The outputs, all of them, in the signature's order; they may be kept. Raises Failure."""
    return await caller.call(route, inputs.tensors, inputs.rows, inputs.size_bytes, owned, terms)


def size_of(outputs: list[OutputTensor]) -> int:
    """Bytes of outputs, about: what `apart` asks for."""
    return sum(
        sum(map(len, output.array)) + 8 * len(output.array) if isinstance(output.array, list) else output.array.nbytes
        for output in outputs
    )
