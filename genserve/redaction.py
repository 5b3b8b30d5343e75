"""Redaction: removes the paths of the server's file system from error texts that clients see.

Errors are raised with full paths, for the log and the command line. They may quote model.py, ONNX Runtime,
torch or the operating system, so paths are removed only where an error leaves the server.
"""

from __future__ import annotations

import logging
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TypeVar

from genserve.errors import GenserveError

logger = logging.getLogger(__name__)

_Error = TypeVar("_Error", bound=GenserveError)

_BEFORE = r"(?<![\w.~/-])(?:file://)?"  # not in the middle of another path, or of a URL
# The root folders of operating systems. A text that begins with one of them, or with a root folder of this
# machine, is a path; `/v2/models` is not.
_TOP_FOLDERS = (
    "Applications|Library|System|Users|Volumes|app|bin|boot|data|dev|etc|home|lib|lib64|media|mnt|nix|opt|"
    "private|proc|root|run|sbin|snap|srv|sys|tmp|usr|var"
)
# A traceback of Python or TorchScript. The exception itself is on the line after it, and stays.
_TRACEBACK = re.compile(r"Traceback (?:[^\n]* )?\(most recent call last\):(?:\n|$)(?:(?:[ \t][^\n]*)?\n)*")

# Longer texts repeat what a client has sent, or fill its screen.
_MAX_CHARS = 8192

_repositories: set[str] = set()
_route_folders: set[str] = set()


def redact_repositories(roots: Iterable[Path]) -> None:
    """Shorten paths below these folders to relative ones (`m/config.pbtxt:3:1`), in the whole process."""
    for root in roots:
        _repositories.update(map(str, (root, root.absolute(), root.resolve())))
    _patterns.cache_clear()


def keep_routes(paths: Iterable[str]) -> None:
    """Keep these paths of HTTP in texts, even if the machine has a folder that is called so."""
    _route_folders.update(path.split("/")[1] for path in paths)
    _patterns.cache_clear()


def redacted_text(text: str) -> str:
    """Return a text without tracebacks and without the paths of this machine.

    A path below a model repository or a package folder becomes relative to the folder; any other path is
    reduced to its last part.
    """
    if len(text) > _MAX_CHARS:
        text = text[:_MAX_CHARS] + " ..."
    if "/" not in text and "Traceback" not in text:
        return text     # the patterns would take longer than the rest of most rejections
    below, quoted, others = _patterns()
    text = below.sub(_without_folder, _TRACEBACK.sub("", text))
    text = quoted.sub(lambda path: path["quote"] + (path["last"] or path["top"]) + path["quote"], text)
    return others.sub(lambda path: path["last"] or path["top"], text)


def redacted_error(error: _Error) -> _Error:
    """Return an error with `redacted_text` applied to its message and remedy.

    The full text is logged at debug level only, since it may quote the request.
    """
    message, remedy = redacted_text(error.message), redacted_text(error.remedy)
    if (message, remedy) == (error.message, error.remedy):
        return error
    # %r quotes the text, which may come from a client and must not begin a line of the log.
    logger.debug("the client sees this error without its paths: %r", str(error))
    redacted = type(error).__new__(type(error), message)    # `__init__` has another signature in each class
    vars(redacted).update(vars(error), message=message, remedy=remedy)
    return redacted


def _without_folder(found: re.Match[str]) -> str:
    if found["slash"]:
        return ""
    if found["folder"] in _repositories and found["folder"].startswith("/"):
        return "the model repository"
    return found["folder"].rpartition("/")[2]


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Return the patterns for known folders, for other quoted paths, and for other unquoted paths."""
    packages = {*sysconfig.get_paths().values(), str(Path(__file__).parents[1])}
    temporary = tempfile.gettempdir()
    folders = {path for path in (*_repositories, *packages) if path.strip("./")}
    places = (*folders, temporary, str(Path.cwd()), *sys.path)
    tops = {path.split("/")[1] for path in places if path.strip("/") and path.startswith("/")}
    tops |= {entry.name for entry in Path("/").iterdir() if entry.is_dir()} - _route_folders
    uploads = rf"{re.escape(temporary)}/genserve-\w+"  # see `repository.load_request`
    known = f"(?P<folder>{uploads}|{_one_of(folders)})"
    part = r"[^\s/'\"`,;:()<>\[\]{}|]+"
    top = rf"/+(?P<top>{_one_of(tops)}|{_TOP_FOLDERS})(?![\w-])"
    return (
        re.compile(rf"{_BEFORE}{known}(?:(?P<slash>/+)|(?![\w.-]))"),
        # A name in quotes may have spaces.
        re.compile(rf"(?P<quote>['\"`]){top}(?:/+(?P<last>[^/'\"`\n]+))*/*(?P=quote)"),
        re.compile(rf"{_BEFORE}{top}(?:/+(?P<last>{part}))*/*"),
    )


def _one_of(names: Iterable[str]) -> str:
    return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
