"""What the programs in Python share: rows are functions, and `main` runs them."""

import json
import os
import sys
import time
import traceback

URL = os.environ["GENSERVE_URL"]
MODEL = os.environ["GENSERVE_MODEL"]
TOKENIZER = os.environ["GENSERVE_TOKENIZER"]

_rows = []


class TextFailure(Exception):
    """The model's text is not what the client needs; the wire is as it should be."""


def row(name, *, text_errors=()):
    """Make a function a row, which works if it returns.

    Args:
        name: of the row.
        text_errors: exceptions by which this client says that the model's text is not what it needs.
    """

    def register(function):
        _rows.append((name, function, (TextFailure, *text_errors)))
        return function

    return register


def expect(condition, detail):
    """Fail the row unless the wire is as it should be."""
    if not condition:
        raise AssertionError(detail)


def expect_text(condition, detail):
    """Fail the row for the model's text, unless it is as it should be."""
    if not condition:
        raise TextFailure(detail)


def main():
    """Run the rows and print them."""
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)   # what the client prints goes elsewhere
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
    os._exit(0)     # threads that a client has left do not matter
