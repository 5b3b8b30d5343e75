"""A server of python models on a free port of 127.0.0.1, in a thread of the test's process."""

from __future__ import annotations

import shutil
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn

from genserve.generation_metrics import Metrics
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from genserve.server.app import create_app
from genserve.server.kserve.state import KServeState
from genserve.server.services import Services
from genserve.settings import ServerSettings

MODELS = Path(__file__).parents[1] / "conformance" / "triton" / "models"


def copy_models(names: tuple[str, ...], folder: Path) -> None:
    for name in names:
        shutil.copytree(MODELS / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


class LiveKServe:
    """`with LiveKServe(folder) as server: ... server.address ...`; load and unload are allowed."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        metrics = Metrics()
        options = RepositoryOptions(control_mode=ControlMode.EXPLICIT)
        self.repository = Repository((folder,), options=options, metrics=metrics)
        self.services = Services(
            settings=ServerSettings(model_repository=(folder,), **settings),
            repository=self.repository,
            metrics=metrics,
        )
        self._listener = socket.create_server(("127.0.0.1", 0))
        app = create_app(self.services, KServeState(self.services.settings))
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def connect(self) -> socket.socket:
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)))

    def __enter__(self) -> Self:
        self.repository.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()
        self.repository.close()
