"""Tasks that do not hear a cancellation the first time."""

from __future__ import annotations

import asyncio

from millstream.services.process.cancellation import cancel_all

PATIENCE_S = 30.0


def test_who_does_not_hear_a_cancellation_is_cancelled_again():
    async def whole() -> None:
        lost = 0

        async def deaf() -> None:
            nonlocal lost
            while lost < 2:
                try:
                    await asyncio.sleep(PATIENCE_S)
                except asyncio.CancelledError:
                    lost += 1
            await asyncio.sleep(PATIENCE_S)

        async def fails() -> None:
            raise ValueError

        tasks = [asyncio.create_task(deaf()), asyncio.create_task(fails()), asyncio.create_task(asyncio.sleep(0))]
        await asyncio.sleep(0)
        await asyncio.wait_for(cancel_all(tasks), PATIENCE_S)
        assert lost == 2
        assert all(task.done() for task in tasks)

    asyncio.run(whole())
