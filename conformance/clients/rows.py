"""Rows: the code that programs in Python share: a row is a function, and `main` runs all rows."""

import json
import os
import signal
import sys
import time
import traceback

URL = os.environ["GENSERVE_URL"]
MODEL = os.environ["GENSERVE_MODEL"]
ENCODER = os.environ["GENSERVE_ENCODER"]
TOKENIZER = os.environ["GENSERVE_TOKENIZER"]

_rows = []


class TextFailure(Exception):
    """The protocol was correct, but the model's text is not what the client needs."""


def row(name, *, text_errors=()):
    """Make a function a row, which works if it returns.

    Args:
        name: the name in the result table.
        text_errors: the exceptions that this client raises if the model's text is not what it needs.
    """

    def register(function):
        _rows.append((name, function, (TextFailure, *text_errors)))
        return function

    return register


def expect(condition, detail):
    """Fail the row unless the server's answer meets a condition."""
    if not condition:
        raise AssertionError(detail)


def expect_text(condition, detail):
    """Fail the row because of the model's text, unless it meets a condition."""
    if not condition:
        raise TextFailure(detail)


def expect_near(question, near, far):
    """Fail the row unless the vector of a question is nearer to one vector than to another.

    The vectors have the length 1, and the 384 numbers of the encoder.
    """
    sizes = {len(vector) for vector in (question, near, far)}
    expect(sizes == {384}, f"the vectors have {sizes} numbers")

    def cosine(vector):
        return sum(one * other for one, other in zip(question, vector, strict=True))

    expect(abs(cosine(question) - 1) < 1e-4, f"the square of the length is {cosine(question)}")
    expect(cosine(near) > cosine(far) + 0.2, f"{cosine(near)} is not above {cosine(far)}")


def main():
    """Run the rows and print them."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))   # an orderly exit ends what a row runs
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)   # the client's own output goes to stderr
    for name, function, text_errors in _rows:
        begun = time.monotonic()
        result = {"row": name, "ok": True, "detail": ""}
        try:
            result["detail"] = function() or ""
        except Exception as error:
            traceback.print_exc()
            kind = "" if isinstance(error, (AssertionError, TextFailure)) else f"{type(error).__name__}: "
            result |= {"ok": False, "detail": f"{kind}{error}"[:600]}
            if isinstance(error, text_errors):
                result["cause"] = "text"
        result["seconds"] = round(time.monotonic() - begun, 2)
        print(json.dumps(result), file=rows, flush=True)
    sys.stdout.flush()
    os._exit(0)     # do not wait for threads that a client has left behind
