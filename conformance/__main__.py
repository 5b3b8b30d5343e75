"""`python -m conformance`: runs real clients against a server; see docs/conformance.md."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from conformance.client_programs import ClientProgram, Row, client_programs, run_program
from conformance.environments import Environment, EnvironmentFailed, build_environment
from conformance.loopback import NoLoopback, loopback_network
from conformance.result_table import Result, as_json, as_markdown, as_summary, as_text, from_json, results
from conformance.router_programs import NUM_SERVERS, RouterProgram, compared, router_program, running_router
from conformance.scripted_model import NAME, build_agent_models, build_scripted_model
from conformance.servers import recorded, running_server

CACHE = Path(__file__).parents[1] / ".conformance"
DOCS = Path(__file__).parents[1] / "docs" / "conformance.md"
DEFAULT_MODEL = "smollm2"
ENCODER = "all-minilm-l6-v2"    # the model of vectors, beside each of the two
_NUM_REPLICAS = 3       # replicas with --deployment
MODELS = {"default": DEFAULT_MODEL, "scripted": NAME}
# The client that runs through a router, unless the command line names clients.
SMOKE = "openai"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where programs run: the URLs of servers by model, and the words before a command."""

    urls: dict[str, str]
    prefix: tuple[str, ...] = ()


def main() -> int:
    """Run the clients that the command line names; return the exit status."""
    options = _options()
    router = router_program(options.through) if options.through else None
    programs = client_programs(options.only or ([SMOKE] if router else []))
    if options.list:
        print("\n".join(program.name for program in programs))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an orderly exit ends the servers too
    options.cache.mkdir(parents=True, exist_ok=True)
    for log in options.cache.glob("server-*.log"):      # logs of the previous run
        log.unlink()
    repositories = _repositories(options.cache)
    wanted = [options.model] if options.model else list(MODELS)
    agents = [program for program in programs if program.is_agent and "scripted" in wanted]
    others = [program for program in programs if not program.is_agent]
    table: list[Result] = []
    server = partial(running_server, num_replicas=_NUM_REPLICAS if options.deployment else 0)
    with ExitStack() as stack:
        urls = {}
        for model in wanted if others else ():
            log = options.cache / f"server-{model}.log"
            urls[model] = stack.enter_context(server(repositories[model], log=log))
        if router:
            table += _place_router(router, urls, repositories, cache=options.cache, stack=stack)
        places = [(Place(urls=urls), others)]
        if agents and (place := _place_for_agents(options.cache, stack=stack)):
            places.append((place, agents))
        for place, here in places:
            for program in here:
                table += _run(program, place, cache=options.cache, record=options.record, router=router)
                if not options.keep:
                    shutil.rmtree(options.cache / "environments" / program.name, ignore_errors=True)
        table += _of_the_server(wanted, cache=options.cache)
    print("\n" + as_text(table))
    if not options.model and not options.deployment:
        whole = _with_other_clients(table, options.cache / "results.json")
        _write(whole, options.cache)
        if options.docs:
            _write_docs(whole)
    return 0 if table and all(result.works for result in table) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this client; repeatable")
    parser.add_argument("--list", action="store_true", help="print the names of the clients")
    parser.add_argument("--keep", action="store_true", help="keep the environments for the next run")
    parser.add_argument("--model", choices=MODELS, help="run against one of the two models only")
    parser.add_argument(
        "--deployment", action="store_true", help="run against three replicas on Ray Serve; writes no results"
    )
    parser.add_argument("--record", action="store_true", help="write all bytes that pass to CACHE/wire/")
    parser.add_argument(
        "--through", metavar="ROUTER", help=f"{SMOKE}, or --only, through this router and three servers"
    )
    parser.add_argument("--docs", action="store_true", help="also write it to docs/conformance.md")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of models, environments, results")
    return parser.parse_args()


def _repositories(cache: Path) -> dict[str, Path]:
    """Return the model repositories of the two models, built if missing."""
    repositories = {model: cache / "repositories" / model for model in MODELS}
    default = repositories["default"]
    for name in (DEFAULT_MODEL, ENCODER):
        command = [sys.executable, "-m", "genserve", "pull", name, f"--model-repository={default}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    build_scripted_model(repositories["scripted"], tokenizer=default / f"{DEFAULT_MODEL}_tokenizer" / "1")
    for folder in default.glob(f"{ENCODER}*"):
        shutil.copytree(folder, repositories["scripted"] / folder.name, dirs_exist_ok=True)
    return repositories


def _place_for_agents(cache: Path, *, stack: ExitStack) -> Place | None:
    """Start a server of the models for agents, without a network; None: the system does not allow that."""
    try:
        prefix = stack.enter_context(loopback_network())
    except NoLoopback as error:
        print(f"the coding agents are left out, since this system allows no network namespace: {error}")
        return None
    repository = cache / "repositories" / "agents"
    default = cache / "repositories" / "default"
    build_agent_models(repository, tokenizer=default / f"{DEFAULT_MODEL}_tokenizer" / "1")
    log = cache / "server-scripted-agents.log"
    url = stack.enter_context(running_server(repository, log=log, prefix=prefix))
    return Place(urls={"scripted": url}, prefix=prefix)


def _place_router(
    router: RouterProgram,
    urls: dict[str, str],
    repositories: Mapping[str, Path],
    *,
    cache: Path,
    stack: ExitStack,
) -> list[Result]:
    """Start a router in front of each server and two more of its kind, and write its URL to `urls`.

    Returns the rows that compare the router with the server.
    """
    environment = build_environment(router.folder, cache=cache / "environments")
    rows = {}
    for model, server in urls.items():
        servers = [server]
        for number in range(2, NUM_SERVERS + 1):
            log = cache / f"server-{model}-{number}.log"
            servers.append(stack.enter_context(running_server(repositories[model], log=log)))
        log = cache / f"{router.name}-{model}.log"
        url = stack.enter_context(running_router(router, environment, servers=servers, log=log))
        rows[model] = router.with_limits(compared(url, server, model=MODELS[model]))
        urls[model] = url
    return results(router.name, environment.version, rows)


def _run(
    program: ClientProgram,
    place: Place,
    *,
    cache: Path,
    record: bool,
    router: RouterProgram | None,
) -> list[Result]:
    begun = time.monotonic()
    rows: dict[str, list[Row]] = {}
    version = ""
    try:
        environment = build_environment(
            program.folder, cache=cache / "environments", needs_torch=program.needs_torch
        )
        version = environment.version
        for model in program.models:
            if model in place.urls:
                rows[model] = _against(program, environment, model, place=place, cache=cache, record=record)
    except EnvironmentFailed as error:
        rows["default"] = [Row(name="its environment", outcome="failed", detail=str(error))]
    title = program.title
    if router:
        title += f" through {router.name}"
        rows = {model: router.with_limits(of_model) for model, of_model in rows.items()}
    joined = results(title, version, rows)
    num_failed = sum(not result.works for result in joined)
    seconds = time.monotonic() - begun
    print(f"{program.name} {version}: {len(joined)} rows, {num_failed} failed, {seconds:.0f} s")
    for result in joined:
        if not result.works:
            print(f"  {result.row}: {result.detail}")
    sys.stdout.flush()
    return joined


def _against(
    program: ClientProgram,
    environment: Environment,
    model: str,
    *,
    place: Place,
    cache: Path,
    record: bool,
) -> list[Row]:
    name = f"{program.name}-{model}"
    for folder in ("logs", "wire"):
        (cache / folder).mkdir(exist_ok=True)
    url = place.urls[model]
    # The proxy has the network of this process.
    proxy = recorded(url, cache / "wire" / name) if record and not place.prefix else nullcontext(url)
    with proxy as seen:
        log = cache.absolute() / "logs" / f"{name}.log"
        name = MODELS[model]
        tokenizer = cache.absolute() / "repositories" / model / f"{name}_tokenizer" / "1"
        return run_program(
            program,
            environment,
            url=seen,
            model=name,
            encoder=ENCODER,
            tokenizer=tokenizer,
            log=log,
            prefix=place.prefix,
        )


def _of_the_server(models: list[str], *, cache: Path) -> list[Result]:
    """Return the row that fails if a request made the server log a traceback."""
    rows = {}
    for model in models:
        logs = [log.read_text(encoding="utf-8") for log in sorted(cache.glob(f"server-{model}*.log"))]
        _, found, rest = "".join(logs).partition("Traceback (most recent call last)")
        detail = " ".join(rest.split())[:400]
        rows[model] = [Row(name="no traceback", outcome="failed" if found else "ok", detail=detail)]
    return results("genserve's log", "", rows)


def _with_other_clients(table: list[Result], file: Path) -> list[Result]:
    """Return the results of this run, and from a file the results of clients that it did not run."""
    before = from_json(file.read_text(encoding="utf-8")) if file.exists() else []
    ran = {result.client for result in table}
    whole = [*table, *(result for result in before if result.client not in ran)]
    return sorted(whole, key=lambda result: result.client.lower())   # the rows of a client keep their order


def _write(table: list[Result], cache: Path) -> None:
    from genserve.version import __version__

    facts = {"genserve": __version__, "python": sys.version.split()[0]}
    (cache / "results.json").write_text(as_json(table, **facts), encoding="utf-8")
    (cache / "results.md").write_text(as_markdown(table), encoding="utf-8")
    print(f"written to {cache / 'results.md'} and results.json")


def _write_docs(table: list[Result]) -> None:
    page = DOCS.read_text(encoding="utf-8")
    before, begin, rest = page.partition("<!-- table:")
    mark, _, rest = rest.partition("\n")
    _, end, after = rest.partition("<!-- end of the table -->")
    DOCS.write_text(f"{before}{begin}{mark}\n{as_summary(table)}{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
