"""The replay's time: monotonic seconds and sleeping, passed in so that tests need not wait."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment, and a pause."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
