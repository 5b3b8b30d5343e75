"""Chat on terminal: the REPL over a fake model; run by the tests in a terminal of their own.

When the chat is over it prints which streams were closed.
"""

from __future__ import annotations

import fcntl
import sys
import termios

from genserve.cli.chat.repl import run_repl
from tests.cli.fake_model import FakeModel, chat_with

if __name__ == "__main__":
    # The terminal becomes the one that controls this process, so that its Ctrl-C is a signal.
    fcntl.ioctl(sys.stdin.fileno(), termios.TIOCSCTTY, 0)
    model = FakeModel()
    run_repl(chat_with(model))
    print(f"streams closed: {[stream.is_closed for stream in model.streams]}")
    print(f"last asked: {[message.content for message in model.asked[-1]] if model.asked else None}")
