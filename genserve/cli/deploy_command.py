"""The command `genserve deploy`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from genserve.cli.completion_command import model_names
from genserve.cli.flags import RepositoriesFlags
from genserve.cli.parser import UsageError
from genserve.errors import GenserveError
from genserve.settings import Flag, flag

_models_flag = partial(Flag, heading="Models")
_cluster_flag = partial(Flag, heading="Cluster")


@dataclass(frozen=True, kw_only=True)
class DeployFlags(RepositoriesFlags):
    """The options of `genserve deploy`."""

    target: Literal["ray"] = flag(
        MISSING, Flag(help="Where to deploy: ray is a cluster of Ray Serve.", is_argument=True)
    )
    model: list[str] | None = flag(
        None,
        Flag(
            help="Models to deploy: of the repository, smollm2, or ORG/NAME. Default: all there that are no "
            "part of another one.",
            is_argument=True,
            complete=model_names,
        ),
    )
    config: Path | None = flag(
        None,
        _models_flag(
            help="Deploy this file, which --dry-run has printed and you may have edited, instead of the "
            "models, replicas and ports of the flags."
        ),
    )
    min_replicas: int = flag(1, _models_flag(help="Least replicas of each generation model.", minimum=1))
    max_replicas: int | None = flag(
        None,
        _models_flag(
            help="Most replicas of each generation model, which follow its load. Default: the least.",
            minimum=1,
            show_default=False,
        ),
    )
    address: str | None = flag(
        None,
        _cluster_flag(
            help="Ray dashboard of a cluster, such as http://127.0.0.1:8265. Default: a cluster of this "
            "machine that ends with the command.",
            variable="RAY_DASHBOARD_ADDRESS",
        ),
    )
    name: str = flag("genserve", _cluster_flag(help="Name of the application in the cluster."))
    host: str = flag("127.0.0.1", _cluster_flag(help="Address to listen on; 0.0.0.0 lets other machines in."))
    port: int = flag(
        8000,
        _cluster_flag(
            help="Port to listen on; each application of a cluster has another one.", minimum=1, maximum=65535
        ),
    )
    dry_run: bool = flag(False, Flag(help="Print the config file only."))
    detach: bool = flag(False, Flag(help="Return as soon as the models answer."))
    delete: bool = flag(False, Flag(help="Delete the application of this name."))


def deploy(flags: DeployFlags) -> None:
    """Serve the models of a repository by replicas in several processes or machines, on Ray Serve.

    The replicas answer behind an ingress with all HTTP interfaces of `genserve serve`. Deploying again
    replaces the replicas of models whose files have changed, one after the other; no request fails.

    Runs until Ctrl-C, which deletes the application unless it ran before, or with --detach until the models
    answer. `serve status` shows what runs.
    """
    from genserve.deploy.ray.serve_library import require_ray

    require_ray()
    if flags.address is None and (flags.detach or flags.delete):
        raise UsageError(
            f"{'--detach' if flags.detach else '--delete'} needs the --address of a cluster, which "
            "`ray start --head` starts"
        )
    if flags.delete:
        assert flags.address is not None
        _delete(flags.name, address=flags.address)
        return
    if flags.config is None:
        deployed = _generated(flags)
    elif flags.model:
        raise UsageError("the file of --config names the models itself")
    else:
        deployed = _read(flags.config)
    if flags.dry_run:
        from genserve.deploy.ray.config_file import to_yaml

        print(to_yaml(deployed), end="")
        return
    _warn_if_open(deployed)
    with _cluster(flags.address, config=deployed) as url:
        _run(deployed, url=url, detach=flags.detach)


def _generated(flags: DeployFlags) -> dict[str, Any]:
    """Return the config of the models of a repository.

    Raises:
        UsageError: the maximum of replicas is less than the minimum.
        GenserveError: other machines could connect without an API key, or `find_models` fails.
    """
    from genserve.cli.model_choice import bring_models
    from genserve.deploy.ray.deploy_config import Scale, find_models, serve_config
    from genserve.server.access.access_control import is_loopback
    from genserve.store import default_repository

    least, most = flags.min_replicas, flags.max_replicas
    if most is not None and most < least:
        raise UsageError(f"--max-replicas is {most}, less than --min-replicas {least}")
    scale = Scale(min_replicas=least, max_replicas=most or least)
    if not os.environ.get("GENSERVE_API_KEY") and not is_loopback(flags.host):
        raise GenserveError(
            f"--host {flags.host} lets other machines connect, and no API key is set",
            remedy="set GENSERVE_API_KEY here and on the machines of the cluster; or write "
            "`api_key_file: PATH` or `allow_unauthenticated: true` under `settings` in the file that "
            "--dry-run prints, and deploy it with --config",
        )
    folders = list(flags.model_repository or [default_repository()])
    return serve_config(
        find_models(folders, bring_models(flags.model or (), roots=folders)),
        name=flags.name,
        roots=folders,
        settings={"host": flags.host, "http_port": flags.port},
        scale=scale,
    )


def _read(path: Path) -> dict[str, Any]:
    """Return the config of a file, with the fingerprints of its models; without a folder, they stay."""
    from genserve.deploy.ray.application_args import ApplicationArgs
    from genserve.deploy.ray.config_file import read_config
    from genserve.deploy.ray.deploy_config import IMPORT_PATH, find_models, with_fingerprints

    config = read_config(path)
    for application in config["applications"]:
        if application["import_path"] != IMPORT_PATH:
            continue
        args = ApplicationArgs.model_validate(application["args"])
        if all(root.is_dir() for root in args.model_repository):
            models = find_models(args.model_repository, args.models, needed=args.models)
            config = with_fingerprints(config, models, application=application["name"])
    return config


def _warn_if_open(config: Mapping[str, Any]) -> None:
    """Warn if a file lets other machines connect without a key; the ingress rejects other open settings."""
    from genserve.deploy.ray.deploy_config import IMPORT_PATH
    from genserve.server.access.access_control import is_loopback

    for application in config["applications"]:
        if application["import_path"] != IMPORT_PATH:
            continue
        settings = application["args"].get("settings", {})
        host = settings.get("host", "127.0.0.1")
        if is_loopback(host):
            continue
        if settings.get("allow_unauthenticated") and not settings.get("api_key_file"):
            print(
                f"warning: {application['name']}: host {host} lets other machines connect, and "
                "allow_unauthenticated lets them in without a key, unless the machines of the cluster have "
                "GENSERVE_API_KEY",
                file=sys.stderr,
            )


@contextmanager
def _cluster(address: str | None, *, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the URL of a dashboard: `address`, or the dashboard of a cluster that ends with the block."""
    from genserve.deploy.ray.deploy_config import num_cpus
    from genserve.deploy.ray.serve_cluster import local_cluster

    if address is not None:
        yield address
        return
    print("starting a Ray cluster on this machine", file=sys.stderr)
    with local_cluster(num_cpus=num_cpus(config)) as url:
        yield url


def _run(config: Mapping[str, Any], *, url: str, detach: bool) -> None:
    """Deploy, show the progress and the URLs, and wait for Ctrl-C, which deletes the new applications."""
    from genserve.deploy.ray.serve_cluster import ServeCluster

    cluster = ServeCluster(url)
    names = [application["name"] for application in config["applications"]]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if cluster.asks_for_token() is False:
        print(
            f"warning: the Ray cluster at {url} asks for no token: whoever reaches its ports may run code "
            "there; start it with RAY_AUTH_MODE=token",
            file=sys.stderr,
        )
    created = cluster.deploy(config)
    try:
        for name in names:
            for line in cluster.progress(name):
                print(line, file=sys.stderr)
        for name in names:
            print(f"Ready at {cluster.url(name)} (API: /docs)")
        print(f"Ray dashboard at {url}", flush=True)
        if detach:
            return
        signal.pause()
    except KeyboardInterrupt:
        for name in names:
            if name not in created:
                print(f"{name} ran before and goes on; --delete deletes it", file=sys.stderr)
                continue
            print(f"deleting {name} when its requests have ended", file=sys.stderr)
            cluster.delete(name)


def _delete(name: str, *, address: str) -> None:
    from genserve.deploy.ray.serve_cluster import ServeCluster

    ServeCluster(address).delete(name)
    print(f"deleted {name}")
