"""`ServeCluster` and `genserve deploy ray --address` against a dashboard that answers as Ray's does."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from genserve.deploy.ray import serve_cluster
from genserve.deploy.ray.deploy_config import IMPORT_PATH
from genserve.deploy.ray.serve_cluster import ServeCluster
from genserve.errors import DeployFailed, Unauthenticated, Unreachable
from tests.support.command_line import invoke

APP = {"status": "DEPLOYING", "message": "", "deployments": {}, "deployed_app_config": {"name": "a"}}


class Dashboard:
    """The routes of a Ray dashboard that a deployment uses; each GET of the applications takes an answer.

    Attributes:
        configs: that were deployed.
        proxies: the options of Serve's proxies; empty: Serve does not run.
    """

    def __init__(
        self, applications: Sequence[dict[str, Any]], *, mode: str = "token", status: int = 200
    ) -> None:
        self.configs: list[dict[str, Any]] = []
        self.proxies: dict[str, Any] = {}
        self._applications = list(applications)     # the last answer stays
        self._mode, self._status = mode, status
        dashboard = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                dashboard._answer(self, dashboard._get(self.path))

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                dashboard.configs.append(json.loads(body))
                dashboard._answer(self, {})

            def log_message(self, *words: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def _get(self, path: str) -> dict[str, Any]:
        if path == "/api/ray/version":
            return {"ray_version": "2.60.0"}
        if path == "/api/authentication_mode":
            return {"authentication_mode": self._mode}
        many = len(self._applications) > 1
        applications = self._applications.pop(0) if many else self._applications[0]
        return {**self.proxies, "applications": applications}

    def _answer(self, handler: BaseHTTPRequestHandler, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        handler.send_response(self._status if "applications" in content else 200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_cluster, "_POLL_S", 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    application = {"name": "a", "import_path": "somebody.elses:app"}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


def deploy(file: Path, url: str, *words: str) -> Any:
    return invoke(["deploy", "ray", "--config", str(file), "--address", url, *words])


def test_a_cluster_that_goes_away_is_an_error_with_a_remedy() -> None:
    dashboard = Dashboard([{"a": APP}])
    cluster = ServeCluster(dashboard.url)
    dashboard.close()
    calls = (lambda: next(cluster.progress("a")), lambda: cluster.url("a"), lambda: cluster.delete("a"))
    for call in calls:
        with pytest.raises(Unreachable, match=re.escape(dashboard.url)) as raised:
            call()
        assert raised.value.remedy
    with pytest.raises(Unreachable):
        cluster.deploy({"applications": []})


@pytest.mark.parametrize(("status", "error"), [(503, Unreachable), (401, Unauthenticated)])
def test_a_dashboard_that_rejects_is_an_error(status: int, error: type[Exception]) -> None:
    dashboard = Dashboard([{}], status=status)
    with pytest.raises(error):
        ServeCluster(dashboard.url).url("a")
    dashboard.close()


def test_an_application_that_vanishes_ends_its_progress() -> None:
    dashboard = Dashboard([{"a": APP}, {}, {"a": APP}, {}])
    with pytest.raises(DeployFailed, match="has no application 'a' any more"):
        list(ServeCluster(dashboard.url).progress("a"))
    with pytest.raises(DeployFailed, match="has no application 'a' any more"):
        ServeCluster(dashboard.url).url("a")
    dashboard.close()


RUNNING = {"a": {**APP, "status": "RUNNING"}, "other": {**APP, "deployed_app_config": {"name": "other"}}}


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def pause() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(signal, "pause", pause)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_ctrl_c_deletes_what_the_command_created(ctrl_c: None, file: Path) -> None:
    others = {"other": RUNNING["other"]}
    dashboard = Dashboard([others, RUNNING, RUNNING, RUNNING, others])
    ran = deploy(file, dashboard.url)
    dashboard.close()
    assert ran.exit_code == 0, ran.error
    assert "deleting a when its requests have ended" in ran.stderr
    names = [[application["name"] for application in config["applications"]] for config in dashboard.configs]
    assert names == [["other", "a"], ["other"]]


def test_ctrl_c_leaves_what_ran_before(ctrl_c: None, file: Path) -> None:
    dashboard = Dashboard([RUNNING])
    ran = deploy(file, dashboard.url)
    dashboard.close()
    assert ran.exit_code == 0, ran.error
    assert "a ran before and goes on; --delete deletes it" in ran.stderr
    assert len(dashboard.configs) == 1


@pytest.mark.parametrize(("mode", "warns"), [("token", False), ("disabled", True)])
def test_a_cluster_that_asks_for_no_token_is_a_warning(
    ctrl_c: None, file: Path, mode: str, warns: bool
) -> None:
    dashboard = Dashboard([RUNNING], mode=mode)
    ran = deploy(file, dashboard.url, "--detach")
    dashboard.close()
    assert ("asks for no token: whoever reaches its ports may run code" in ran.stderr) == warns


def ours(name: str, **settings: Any) -> dict[str, Any]:
    """The config of an application of genserve."""
    args = {"model_repository": ["/models"], "models": {}, "settings": settings}
    return {"name": name, "import_path": IMPORT_PATH, "route_prefix": None, "args": args}


@pytest.mark.parametrize(
    ("applications", "running", "proxies", "owner"),
    [
        ([ours("a"), ours("b", http_port=8000)], [], "Disabled", "a"),
        ([ours("b")], [ours("a")], "Disabled", "a"),
        ([ours("b")], [], "EveryNode", "Serve's proxies"),
        ([ours("b", http_port=9000)], [ours("a")], "Disabled", ""),
        ([ours("a", max_queue=8)], [ours("a")], "Disabled", ""),
        ([ours("b", http_port=9000)], [], "EveryNode", ""),
    ],
)
def test_two_applications_do_not_share_a_port(
    applications: list[dict[str, Any]], running: list[dict[str, Any]], proxies: str, owner: str
) -> None:
    """The system would share their clients among them."""
    dashboard = Dashboard([{one["name"]: {**APP, "deployed_app_config": one} for one in running}])
    dashboard.proxies = {"proxy_location": proxies, "http_options": {"port": 8000}}
    cluster = ServeCluster(dashboard.url)
    if owner:
        with pytest.raises(DeployFailed, match=rf"\bb\b.*\b{owner}\b.*\b8000\b"):
            cluster.deploy({"proxy_location": "Disabled", "applications": applications})
    else:
        cluster.deploy({"proxy_location": "EveryNode", "applications": applications})
    assert len(dashboard.configs) == (not owner)
    dashboard.close()


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0", "http_port": 9000}, "http://10.0.0.7:9000"),
        ({"host": "::", "ssl_certfile": "/server.pem"}, "https://10.0.0.7:8000"),
        ({"host": "::1"}, "http://[::1]:8000"),
    ],
)
def test_the_url_is_that_of_a_machine_with_an_ingress(settings: dict[str, Any], url: str) -> None:
    replicas = [{"state": "STARTING", "node_ip": "10.0.0.6"}, {"state": "RUNNING", "node_ip": "10.0.0.7"}]
    application = {
        **APP,
        "deployed_app_config": ours("a", **settings),
        "deployments": {"ingress": {"replicas": replicas}},
    }
    dashboard = Dashboard([{"a": application}])
    assert ServeCluster(dashboard.url).url("a") == url
    dashboard.close()


def test_the_url_of_an_application_of_somebody_else_is_that_of_the_proxies() -> None:
    dashboard = Dashboard([{"a": {**APP, "route_prefix": "/a"}}])
    dashboard.proxies = {"proxy_location": "EveryNode", "http_options": {"host": "0.0.0.0", "port": 8001}}
    assert ServeCluster(dashboard.url).url("a") == "http://127.0.0.1:8001/a"
    dashboard.close()
