"""Tasks beside requests: what fails is started again, and shown."""

import asyncio

from app.background import Background


def test_a_task_that_fails_is_started_again_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr("app.background.FIRST_DELAY", 0.01)
    begun, other = [], []

    async def fails():
        begun.append(1)
        if len(begun) < 3:
            raise ValueError("not yet")
        await asyncio.sleep(60)

    async def runs():
        while True:
            other.append(1)
            await asyncio.sleep(0.01)

    async def inside():
        background = Background()
        background.start("fails", fails)
        background.start("runs", runs)
        while len(begun) < 3:
            await asyncio.sleep(0.01)
        assert background.problems() == {"fails": "ValueError: not yet"}
        await background.stop()

    asyncio.run(asyncio.wait_for(inside(), 20))
    assert len(other) > 1
