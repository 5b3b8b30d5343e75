"""Export job: pulls or exports a model for a server, in a process of its own, which frees its memory.

    python -m genserve.export.export_job JSON

`{"repository": FOLDER, "pull": NAME}` pulls a model by its name, `{"repository": FOLDER, "source": PATH,
"name": NAME, "precision": PRECISION, "adapters": [PATH]}` exports one. Each line of the output is a JSON
object: `status` with `total` and `completed` of a task, at the end `name` of the model, or `error` with its
code, message and remedy.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from genserve.errors import ExportError, GenserveError
from genserve.export import export_model, known_encoder, pull, pull_encoder, pull_remedy, pulled_name
from genserve.export.export_options import Unit

_INTERVAL_S = 0.2   # between two lines of one task


class LineProgress:
    """Writes the tasks of an export as lines; a `Progress`."""

    def __init__(self, write: Callable[[Mapping[str, Any]], None]) -> None:
        self._write = write

    @contextmanager
    def task(
        self, name: str, *, total: int | None = None, unit: Unit = ""
    ) -> Iterator[Callable[[int], None]]:
        """See `Progress.task`."""
        del unit
        completed, written_s = 0, time.monotonic()

        def write() -> None:
            counts = {} if total is None else {"total": total, "completed": completed}
            self._write({"status": name, **counts})

        def advance(units: int) -> None:
            nonlocal completed, written_s
            completed += units
            if total is not None and (completed == total or time.monotonic() - written_s >= _INTERVAL_S):
                written_s = time.monotonic()
                write()

        write()
        yield advance


def run(job: Mapping[str, Any], write: Callable[[Mapping[str, Any]], None]) -> None:
    """Run a job, and write its lines. Raises what `pull` and `export_model` raise."""
    repository, progress = Path(job["repository"]), LineProgress(write)
    name = job.get("pull")
    if name is None:
        report = export_model(
            job["source"],
            repository=repository,
            name=job["name"],
            precision=job.get("precision"),
            adapters=[Path(adapter) for adapter in job.get("adapters", ())],
            progress=progress,
        )
        write({"name": report.name})
        return
    local_name, encoder = pulled_name(name), known_encoder(name)
    if local_name is None:
        raise ExportError(f"{name!r} is not a model that can be pulled", remedy=pull_remedy(name))
    if encoder is not None:
        pull_encoder(encoder, repository=repository, progress=progress)
    else:
        pull(name, repository=repository, progress=progress)
    write({"name": local_name})


def main(text: str, output: TextIO) -> None:
    """Run the job of a JSON text."""

    def write(line: Mapping[str, Any]) -> None:
        print(json.dumps(line), file=output, flush=True)

    try:
        run(json.loads(text), write)
    except GenserveError as error:
        write({"error": {"code": error.code, "message": error.message, "remedy": error.remedy}})


def start() -> None:
    """Run the job of the command line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))   # which deletes what is incomplete
    lines, sys.stdout = sys.stdout, sys.stderr      # libraries print, too
    main(sys.argv[1], lines)


if __name__ == "__main__":
    start()
