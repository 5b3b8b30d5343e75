from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from genserve.backends.python.python_model import EventLoop


def test_a_coroutine_that_refuses_to_be_cancelled_does_not_hold_up_the_close(caplog):
    started, end = threading.Event(), threading.Event()

    async def refuse():
        while not end.is_set():
            started.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    loop = EventLoop("m_0", close_timeout_s=0)
    loop.submit(refuse())
    assert started.wait(10)
    loop.close()
    assert "asyncio-m_0: a coroutine does not react to its cancellation" in caplog.text
    [thread] = [thread for thread in threading.enumerate() if thread.name == "asyncio-m_0"]
    end.set()
    thread.join()
