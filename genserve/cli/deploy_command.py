"""The command `genserve deploy`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from genserve.cli.completion_command import model_names
from genserve.cli.flags import ModelRepositories, takes_flags
from genserve.errors import GenserveError

_models_option = partial(typer.Option, rich_help_panel="Models")
_cluster_option = partial(typer.Option, rich_help_panel="Cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeployFlags:
    """The options of `genserve deploy`."""

    target: Annotated[Literal["ray"], typer.Argument(help="Where to deploy: ray is a cluster of Ray Serve.")]
    model: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models to deploy: of the repository, smollm2, or ORG/NAME. Default: all there that are no "
            "part of another one.",
            autocompletion=model_names,
            show_default=False,
        ),
    ] = None
    model_repository: ModelRepositories = None
    config: Annotated[
        Path | None,
        _models_option(
            help="Deploy this file, which --dry-run has printed and you may have edited, instead of the "
            "models, replicas and ports of the flags.",
        ),
    ] = None
    min_replicas: Annotated[
        int, _models_option(min=1, help="Least replicas of each generation model.")
    ] = 1
    max_replicas: Annotated[
        int | None,
        _models_option(
            min=1,
            help="Most replicas of each generation model, which follow its load. Default: the least.",
            show_default=False,
        ),
    ] = None
    address: Annotated[
        str | None,
        _cluster_option(
            envvar="RAY_DASHBOARD_ADDRESS",
            help="Ray dashboard of a cluster, such as http://127.0.0.1:8265. Default: a cluster of this "
            "machine that ends with the command.",
        ),
    ] = None
    name: Annotated[str, _cluster_option(help="Name of the application in the cluster.")] = "genserve"
    host: Annotated[
        str, _cluster_option(help="Address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1"
    port: Annotated[
        int,
        _cluster_option(
            min=1, max=65535, help="Port to listen on; each application of a cluster has another one."
        ),
    ] = 8000
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the config file only.")] = False
    detach: Annotated[
        bool, typer.Option("--detach", help="Return as soon as the models answer.")
    ] = False
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the application of this name.")
    ] = False


@takes_flags(_DeployFlags)
def deploy(flags: _DeployFlags) -> None:
    """Serve the models of a repository by replicas in several processes or machines, on Ray Serve.

    They answer behind an ingress with all HTTP interfaces of `genserve serve`. To deploy again replaces the
    replicas of the models whose files have changed, one after the other; no request fails.

    Runs until Ctrl-C, which deletes the application unless it ran before, or with --detach until the models
    answer. `serve status` shows what runs.
    """
    from genserve.deploy.ray.serve_library import require_ray

    require_ray()
    if flags.address is None and (flags.detach or flags.delete):
        raise typer.BadParameter(
            "needs the --address of a cluster, which `ray start --head` starts",
            param_hint="--detach" if flags.detach else "--delete",
        )
    if flags.delete:
        assert flags.address is not None
        _delete(flags.name, address=flags.address)
        return
    if flags.config is None:
        deployed = _generated(flags)
    elif flags.model:
        raise typer.BadParameter("names the models itself", param_hint="--config")
    else:
        deployed = _read(flags.config)
    if flags.dry_run:
        from genserve.deploy.ray.config_file import to_yaml

        print(to_yaml(deployed), end="")
        return
    _warn_if_open(deployed)
    with _cluster(flags.address, config=deployed) as url:
        _run(deployed, url=url, detach=flags.detach)


def _generated(flags: _DeployFlags) -> dict[str, Any]:
    """Return the config of the models of a repository.

    Raises:
        BadParameter: the most replicas are less than the least.
        GenserveError: other machines could connect without an API key, or as `find_models` does.
    """
    from genserve.cli.model_access import bring_models
    from genserve.deploy.ray.deploy_config import Scale, find_models, serve_config
    from genserve.server.access_control import is_loopback
    from genserve.store import default_repository

    least, most = flags.min_replicas, flags.max_replicas
    if most is not None and most < least:
        raise typer.BadParameter(f"is {most}, less than --min-replicas {least}", param_hint="--max-replicas")
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
    """Return the config of a file, with the fingerprints of its models; those of missing folders stay."""
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
    from genserve.server.access_control import is_loopback

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
    """Yield the URL of a dashboard: that of `address`, or of a cluster that ends with the block."""
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
