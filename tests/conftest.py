"""Fixtures that several folders of tests share, and what holds for all tests.

Heavy packages are imported in the functions that need them: a run in several processes begins with one that
only distributes the tests.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import httpcore2
import pytest
from filelock import FileLock
from httpx2._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings

from tests.support.slim_environment import slim_environment

if TYPE_CHECKING:
    from tests.support.live_server import LiveServer

# No test judges by the clock: an example may take long on a busy machine.
_ON_A_BUSY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Examples are the same in every run, so that a failure belongs to the change that shows it; `make soak` looks
# for new ones.
settings.register_profile("few", _ON_A_BUSY_MACHINE, max_examples=15, derandomize=True)
settings.register_profile("many", _ON_A_BUSY_MACHINE, max_examples=100, derandomize=True)
settings.register_profile("soak", _ON_A_BUSY_MACHINE, max_examples=1000)


def pytest_configure(config: pytest.Config) -> None:
    """`make test` tries a few examples of each property, `make test-extended` many."""
    if config.getoption("--hypothesis-profile") is None:
        settings.load_profile("many" if "hypothesis" in config.option.markexpr else "few")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The whole suite and its extended part run in several processes; a selection, and on a GPU, in this one.

    There is one process more than cores, since tests wait for servers a quarter of the time.
    """
    selects = config.args_source is config.ArgsSource.ARGS or config.option.keyword
    if selects or "not slow" not in config.option.markexpr or _has_gpu():
        return 0
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(num_cores + 1, 4)


def _has_gpu() -> bool:
    """As torch does, which takes seconds to import."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the tests and their modules out of garbage collections, and collect less often.

    `genserve serve` does the same. An unload collects garbage, for half a second among 10,000 tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # with the little garbage among them, which a collection would take a second to find
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape half a surrogate pair in the captured output, which cannot be sent to another process."""
    report = yield
    escaped = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    report.sections = escaped
    return report


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_arrives() -> None:
    """A shell that started the tests in the background lets them, and so their children, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _the_store_is_not_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands without --model-repository find an empty store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GENSERVE_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("GENSERVE_MODEL_REPOSITORY", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """httpx2 reads those of all authorities again for every client and every call without one, 20 ms each."""
    read = httpcore2.default_ssl_context

    @cache
    def context(*_files: str | None, **options: bool) -> ssl.SSLContext:
        return read(**options)

    def cached(**options: bool) -> ssl.SSLContext:
        return context(*map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR")), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore2, "default_ssl_context", cached)
        yield


@pytest.fixture(scope="session", autouse=True)
def _clients_wait_on_a_busy_machine() -> Iterator[None]:
    """By default httpx2 waits for 5 s; a test that hangs is ended by pytest-timeout."""
    with pytest.MonkeyPatch.context() as patch:
        for phase in ("connect", "read", "write", "pool"):
            patch.setattr(DEFAULT_TIMEOUT_CONFIG, phase, 60.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _onnxruntime_does_not_spin() -> Iterator[None]:
    """Other tests need the core on which its workers would wait for the next step of a tiny model."""
    from genserve.backends import onnx_session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_session, "_SPIN_US", 0)
        yield


@pytest.fixture(scope="module", autouse=True)
def _torch_has_one_thread() -> None:
    """Matrix products of the tiny models are several times slower on several threads."""
    if torch := sys.modules.get("torch"):  # its import takes seconds
        torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _collections_are_of_this_module() -> Iterator[None]:
    """Each unload collects garbage, among all that earlier modules have left for 0.2 s."""
    yield
    gc.collect()
    gc.freeze()


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """A folder that the first of the parallel processes builds, and all read."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # its own folder lies in that of the run
        base = base.parent
    folder, partial = base / name, base / f"{name}.partial"
    with FileLock(base / f"{name}.lock"):
        if not folder.exists():
            shutil.rmtree(partial, ignore_errors=True)
            build(partial)
            partial.rename(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_llama import tiny_llama_checkpoint

    return tiny_llama_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def tiny_repository(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A random model of two layers as model `tiny`, fp32."""

    def export(repository: Path) -> None:
        from genserve.export import SilentProgress, export_model

        source = str(request.getfixturevalue("tiny_checkpoint"))
        export_model(source, repository=repository, name="tiny", precision="fp32", progress=SilentProgress())

    return built_once(tmp_path_factory, "repository", export)


@pytest.fixture(scope="session")
def hybrid_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with attention and recurrent states as model `tiny`."""

    def export(repository: Path) -> None:
        from genserve.export import SilentProgress, export_model
        from tests.export.tiny_models import TINY_MODELS, tiny_checkpoint

        source = str(tiny_checkpoint(repository.with_name("hybrid_source"), **TINY_MODELS["qwen3_5"]))
        export_model(source, repository=repository, name="tiny", progress=SilentProgress())

    return built_once(tmp_path_factory, "hybrid", export)


@pytest.fixture(scope="session")
def traced_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of an architecture that no family builds."""
    from tests.export.tiny_models import tiny_checkpoint

    folder = tmp_path_factory.mktemp("gptj") / "checkpoint"
    tiny_checkpoint(folder, model_type="gptj", n_layer=2, n_embd=64, n_head=4, rotary_dim=8, n_positions=128)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return folder


@pytest.fixture(scope="session")
def traced_repository(tmp_path_factory: pytest.TempPathFactory, traced_checkpoint: Path) -> Path:
    """The checkpoint of GPT-J as model `traced`."""
    from genserve.export import SilentProgress, export_model

    def export(repository: Path) -> None:
        source = str(traced_checkpoint)
        export_model(source, repository=repository, name="traced", progress=SilentProgress())

    return built_once(tmp_path_factory, "traced", export)


@pytest.fixture(scope="module")
def endless_templates_end_soon() -> Iterator[None]:
    """A chat template without an end is killed after half a second of CPU time, and not after two."""
    from genserve.text.chat_template import TemplateProcess

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TemplateProcess.__init__.__kwdefaults__, "max_cpu_s", 0.5)
        yield


@pytest.fixture(scope="module")
def tiny_server(tiny_repository: Path) -> Iterator[LiveServer]:
    from tests.support.live_server import LiveServer

    with LiveServer(tiny_repository) as server:
        yield server


@pytest.fixture(scope="session")
def smollm2_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model as it is pulled, int8, in a process that has neither torch nor transformers."""
    command = [sys.executable, "-m", "genserve", "pull", "smollm2", "--model-repository"]
    environment = slim_environment(tmp_path_factory.mktemp("slim"))

    def pull(repository: Path) -> None:
        subprocess.run([*command, str(repository)], env=environment, check=True)

    return built_once(tmp_path_factory, "smollm2", pull)
