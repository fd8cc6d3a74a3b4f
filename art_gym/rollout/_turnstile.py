"""The turnstile: a few episodes at a time go on in one turn of the event loop.

The loop handles everything that is ready before it looks at its timers and sockets again. Where hundreds of answers come at once, all their
episodes would be parsed, stepped and asked on in one go, and everything else would wait for them.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 8
"""Episodes that go on in one turn of the loop: some milliseconds of work."""


class Turnstile:
    """Holds back those that come when enough have passed in this turn of the loop; they pass in the next ones, in the order of their coming."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._passed = 0
        self._turning = False

    async def pass_through(self) -> None:
        """Return at once, or in a later turn of the loop."""
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)
        if self._passed < AT_ONCE and not self._waiting:
            self._passed += 1
            return
        future = self._loop.create_future()
        self._waiting.append(future)
        await future

    def _turn(self) -> None:
        self._passed = 0
        while self._waiting and self._passed < AT_ONCE:
            future = self._waiting.popleft()
            if not future.done():
                self._passed += 1
                future.set_result(None)
        self._turning = self._passed > 0
        if self._turning:
            self._loop.call_soon(self._turn)
