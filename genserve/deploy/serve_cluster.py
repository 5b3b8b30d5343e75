"""Serve cluster: deploys applications by Serve's REST API, as `serve deploy` does, and follows them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from genserve.backends.onnx_session import num_cores
from genserve.deploy.serve_library import import_ray
from genserve.errors import DeployFailed, Unauthenticated, Unreachable

_POLL_S = 0.5
_ENDED = ("RUNNING", "DEPLOY_FAILED", "UNHEALTHY")
# The line of a traceback that says what was raised.
_RAISED = re.compile(r"^[\w.]*\w(?:Error|Exception|NotFound|NotReady|Dependency): (.+)$", re.MULTILINE)


class ServeCluster:
    """A Ray cluster, by the URL of its dashboard."""

    def __init__(self, url: str) -> None:
        """Connect to it.

        Raises:
            Unreachable: nothing of Ray answers there.
            Unauthenticated: it asks for a token.
            MissingDependency: Ray is not installed.
        """
        client = import_ray("ray.dashboard.modules.serve.sdk").ServeSubmissionClient  # of `serve deploy`
        try:
            self._client = client(url)
        except import_ray("ray.exceptions").AuthenticationError as error:
            raise Unauthenticated(
                f"the Ray cluster at {url} asks for a token",
                remedy="set RAY_AUTH_TOKEN to that of `ray get-auth-token` on its head",
            ) from error
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise Unreachable(
                f"no Ray cluster answers at {url}: {error}",
                remedy="give the address of its dashboard, such as http://127.0.0.1:8265; `ray start --head` "
                "starts one",
            ) from error

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Deploy the applications of a config file, or what has changed of them; others stay as they are.

        Raises:
            DeployFailed: the cluster rejects the config.
        """
        names = {application["name"] for application in config["applications"]}
        self._put({**config, "applications": [*config["applications"], *self._configs(besides=names)]})

    def delete(self, name: str) -> None:
        """Delete an application, when its requests have ended; blocks.

        Raises:
            DeployFailed: there is none of this name.
        """
        applications = self._client.get_serve_details()["applications"]
        if name not in applications:
            known = ", ".join(applications) or "none"
            raise DeployFailed(f"there is no application {name!r}", remedy=f"those of the cluster: {known}")
        self._put({"applications": self._configs(besides={name})})
        while name in self._client.get_serve_details()["applications"]:
            time.sleep(_POLL_S)

    def url(self, name: str) -> str:
        """Return the URL of an application on the machine of the dashboard."""
        details = self._client.get_serve_details()
        options = details.get("http_options") or {}
        host = options.get("host", "127.0.0.1")
        prefix = (details["applications"][name].get("route_prefix") or "/").rstrip("/")
        host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        return f"http://{host}:{options.get('port', 8000)}{prefix}"

    def progress(self, name: str) -> Iterator[str]:
        """Yield a line for each change until all replicas of an application answer.

        Raises:
            DeployFailed: it could not be built, or a replica could not be started.
        """
        shown: dict[str, str] = {}
        while True:
            application = self._client.get_serve_details()["applications"].get(name, {})
            for line in _lines(application):
                key = line.partition(":")[0]
                if shown.get(key) != line:
                    shown[key] = line
                    yield line
            if application.get("status") in _ENDED:
                break
            time.sleep(_POLL_S)
        if application["status"] != "RUNNING":
            raise DeployFailed(
                f"{name}: {_reason(application)}", remedy="the logs are in /tmp/ray/session_latest/logs/serve"
            )

    def _configs(self, *, besides: set[str]) -> list[dict[str, Any]]:
        """Return the configs of the applications of others, which Serve would delete without them."""
        applications = self._client.get_serve_details()["applications"]
        return [
            details["deployed_app_config"]
            for name, details in applications.items()
            if name not in besides and details.get("deployed_app_config")
        ]

    def _put(self, config: Mapping[str, Any]) -> None:
        try:
            self._client.deploy_applications(dict(config))
        except RuntimeError as error:
            raise DeployFailed(f"the cluster rejects the config: {error}") from error


def _lines(application: Mapping[str, Any]) -> Iterator[str]:
    for name, deployment in application.get("deployments", {}).items():
        states = [replica["state"] for replica in deployment["replicas"]]
        line = f"{name}: {states.count('RUNNING')} of {deployment['target_num_replicas']} replicas answer"
        leaving = states.count("STOPPING")
        line += f", {leaving} finish their last requests" if leaving else ""
        if deployment["status"] != "HEALTHY" and deployment["message"]:
            line += f" ({_raised(deployment['message'])})"
        yield line


def _reason(application: Mapping[str, Any]) -> str:
    messages = [
        deployment["message"]
        for deployment in application.get("deployments", {}).values()
        if deployment["status"] not in ("HEALTHY", "UPDATING") and deployment["message"]
    ]
    return "; ".join(map(_raised, messages or [application.get("message", "")]))


def _raised(message: str) -> str:
    """Return what the last exception in a message said; without one, the message in one line."""
    raised = _RAISED.findall(message)
    return raised[-1] if raised else " ".join(message.split())


@contextmanager
def local_cluster(*, num_cpus: float) -> Iterator[str]:
    """Run a cluster of this machine alone, reachable from it alone; yields the URL of its dashboard.

    Args:
        num_cpus: that the replicas ask for. They share the cores, if these are fewer.
    """
    ray = import_ray()
    context = ray.init(
        address="local",
        num_cpus=max(num_cores(), round(num_cpus + 0.5)),
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield f"http://{context.dashboard_url}"
    finally:
        ray.shutdown()
