"""Serve cluster: deploys applications by Serve's REST API, as `serve deploy` does, and follows them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

from genserve.deploy.ray.application_args import checked_settings
from genserve.deploy.ray.deploy_config import IMPORT_PATH, INGRESS
from genserve.deploy.ray.serve_library import import_ray
from genserve.errors import DeployFailed, Unauthenticated, Unreachable
from genserve.machine import num_cores
from genserve.server.access.access_control import address_of
from genserve.settings import ServerSettings

_POLL_S = 0.5
_MAX_ABSENT = 20    # polls; Serve's controller may be restarting, and knows no application for a moment
_TIMEOUT_S = 5.0
_ENDED = ("RUNNING", "DEPLOY_FAILED", "UNHEALTHY")
# The line of a traceback that says what was raised.
_RAISED = re.compile(r"^[\w.]*\w(?:Error|Exception|NotFound|NotReady|Dependency): (.+)$", re.MULTILINE)


class ServeCluster:
    """A Ray cluster, by the URL of its dashboard."""

    def __init__(self, url: str) -> None:
        """Connect to the cluster.

        Raises:
            Unreachable: nothing of Ray answers there.
            Unauthenticated: the cluster asks for a token.
            MissingDependency: Ray is not installed.
        """
        client = import_ray("ray.dashboard.modules.serve.sdk").ServeSubmissionClient  # as `serve deploy` does
        self._url = url
        try:
            with self._authenticated():
                self._client = client(url)
        except (OSError, RuntimeError, ValueError) as error:    # errors of requests are OSErrors
            raise Unreachable(
                f"no Ray cluster answers at {url}: {error}",
                remedy="give the address of its dashboard, such as http://127.0.0.1:8265; `ray start --head` "
                "starts one",
            ) from error

    def asks_for_token(self) -> bool | None:
        """Whether the cluster does; None: it does not say."""
        try:
            with urlopen(f"{self._url.rstrip('/')}/api/authentication_mode", timeout=_TIMEOUT_S) as answer:
                mode: str = json.load(answer)["authentication_mode"]
        except (OSError, ValueError, KeyError):
            return None
        return mode != "disabled"

    def deploy(self, config: Mapping[str, Any]) -> set[str]:
        """Deploy the applications of a config file, or what has changed of them; other ones stay as they are.

        Returns:
            The names of the applications that did not run before.

        Raises:
            DeployFailed: two applications would listen on one port, or the cluster rejects the config.
            Unreachable, Unauthenticated: the cluster does not answer any more.
        """
        details = self._details()
        running: dict[str, Any] = details["applications"]
        names: set[str] = {application["name"] for application in config["applications"]}
        applications = [*_configs(running, besides=names), *config["applications"]]
        # Serve ignores the proxy options of a config while it runs.
        _check_ports(applications, proxies=details if details.get("proxy_location") else config)
        self._put({**config, "applications": applications})
        return names - running.keys()

    def delete(self, name: str) -> None:
        """Delete an application, when its requests have ended; blocks.

        Raises:
            DeployFailed: no application has this name.
            Unreachable, Unauthenticated: the cluster does not answer any more.
        """
        applications = self._applications()
        if name not in applications:
            known = ", ".join(applications) or "none"
            raise DeployFailed(f"there is no application {name!r}", remedy=f"those of the cluster: {known}")
        self._put({"applications": _configs(applications, besides={name})})
        while name in self._applications():
            time.sleep(_POLL_S)

    def url(self, name: str) -> str:
        """Return the URL of an application: on the machine of one of its ingresses, or of the dashboard.

        Raises:
            DeployFailed: no application has this name.
            Unreachable, Unauthenticated: the cluster does not answer any more.
        """
        details = self._details()
        application = details["applications"].get(name)
        if application is None:
            raise _vanished(name)
        settings = _settings(application["deployed_app_config"])
        if settings is None:    # somebody else's application, behind Serve's proxies
            options = details.get("http_options") or {}
            address = f"{_reachable(options.get('host', '127.0.0.1'))}:{options.get('port', 8000)}"
            return f"http://{address}{(application.get('route_prefix') or '/').rstrip('/')}"
        replicas = application["deployments"].get(INGRESS, {}).get("replicas", [])
        machine = next((one["node_ip"] for one in replicas if one["state"] == "RUNNING"), "127.0.0.1")
        scheme = "https" if settings.ssl_certfile else "http"
        return f"{scheme}://{address_of(_reachable(settings.host, machine=machine), settings.http_port)}"

    def progress(self, name: str) -> Iterator[str]:
        """Yield a line for each change until all replicas of an application answer.

        Raises:
            DeployFailed: the application could not be built, one of its replicas could not be started, or
                somebody deleted it.
            Unreachable, Unauthenticated: the cluster does not answer any more.
        """
        shown: dict[str, str] = {}
        num_absent = 0
        while True:
            application = self._applications().get(name, {})
            num_absent = 0 if application else num_absent + 1
            if num_absent > _MAX_ABSENT:
                raise _vanished(name)
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

    def _applications(self) -> dict[str, Any]:
        applications: dict[str, Any] = self._details()["applications"]
        return applications

    def _details(self) -> dict[str, Any]:
        try:
            with self._authenticated():
                details: dict[str, Any] = self._client.get_serve_details()
        except (OSError, RuntimeError, ValueError) as error:
            raise self._lost(error) from error
        return details

    def _put(self, config: Mapping[str, Any]) -> None:
        try:
            with self._authenticated():
                self._client.deploy_applications(dict(config))
        except RuntimeError as error:
            raise DeployFailed(f"the cluster rejects the config: {error}") from error
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"the Ray cluster at {self._url} does not answer any more: {error}",
            remedy="`serve status` shows whether it lives; run the command again, which goes on from there",
        )

    @contextmanager
    def _authenticated(self) -> Iterator[None]:
        try:
            yield
        except import_ray("ray.exceptions").AuthenticationError as error:
            raise Unauthenticated(
                f"the Ray cluster at {self._url} asks for a token",
                remedy="set RAY_AUTH_TOKEN to that of `ray get-auth-token` on its head",
            ) from error


def _configs(applications: Mapping[str, Any], *, besides: set[str]) -> list[dict[str, Any]]:
    """Return the configs of the other applications, which Serve would delete without their configs."""
    return [
        details["deployed_app_config"]
        for name, details in applications.items()
        if name not in besides and details.get("deployed_app_config")
    ]


def _settings(application: Mapping[str, Any]) -> ServerSettings | None:
    """Return the settings in the config of an application; None: the application is not genserve's."""
    if application.get("import_path") != IMPORT_PATH:
        return None
    return checked_settings(application["args"].get("settings", {}))


def _check_ports(applications: Iterable[Mapping[str, Any]], *, proxies: Mapping[str, Any]) -> None:
    """Reject applications that would listen on one port: the system would share their clients among them."""
    owners: dict[int, str] = {}
    if proxies.get("proxy_location", "EveryNode") != "Disabled":
        owners[(proxies.get("http_options") or {}).get("port", 8000)] = "Serve's proxies"
    for application in applications:
        settings = _settings(application)
        if settings is None:
            continue
        owner = owners.setdefault(settings.http_port, application["name"])
        if owner != application["name"]:
            raise DeployFailed(
                f"{application['name']} and {owner} would both listen on port {settings.http_port}",
                remedy="give it another port: --port, or `http_port` under `settings` of the config file",
            )


def _reachable(host: str, *, machine: str = "127.0.0.1") -> str:
    """Return an address to which clients connect, where a server listens on `host` of a machine."""
    return machine if host in ("0.0.0.0", "::") else host


def _vanished(name: str) -> DeployFailed:
    return DeployFailed(
        f"the cluster has no application {name!r} any more",
        remedy="somebody has deleted it, or Serve has ended: run the command again",
    )


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
    """Run a cluster of this machine alone; yields the URL of its dashboard.

    Its replicas listen on all addresses, for calls that are pickled. Ray makes a token, and its ports reject
    calls without it, unless RAY_AUTH_MODE is `disabled`.

    Args:
        num_cpus: how many CPUs the replicas ask for; if the machine has fewer cores, they share them.
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
        # By default workers have a niceness of 15, and answers wait for anything else that runs.
        _system_config={"worker_niceness": 0},
    )
    try:
        yield f"http://{context.dashboard_url}"
    finally:
        ray.shutdown()
