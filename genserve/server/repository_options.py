"""Repository options: what the settings of a server say about its repository."""

from __future__ import annotations

from genserve.config.backends import BackendConfig
from genserve.errors import GenserveError, InvalidRequest
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.sampling.defaults import default_sampling_params
from genserve.schedulers.rate_limiter import ResourceCapacity
from genserve.server.triton_metrics import read_metrics_config
from genserve.settings import ServerSettings


def repository_options(settings: ServerSettings) -> RepositoryOptions:
    """Return the options of the repository that a server with these settings serves.

    Raises:
        GenserveError: a setting is invalid; names its flag.
    """
    backends = BackendConfig.parse(settings.backend_config, backend_directory=settings.backend_directory)
    overriding = settings.overriding_generation_config
    try:
        default_sampling_params(overriding)
    except InvalidRequest as error:
        raise GenserveError(f"--override-generation-config: {error.message}") from None
    return RepositoryOptions(
        control_mode=ControlMode(settings.model_control_mode),
        poll_s=settings.repository_poll_s,
        strict_config=settings.strict_model_config,
        strict_placement=settings.strict_placement,
        strict_paths=settings.strict_repository_paths,
        config_name=settings.model_config_name,
        backend_directory=backends.backend_directory,
        default_max_batch_size=backends.default_max_batch_size,
        cache_bytes=settings.cache_bytes,
        load_threads=settings.load_threads,
        generation_config=settings.generation_config == "auto",
        override_generation_config=overriding,
        exit_timeout_s=settings.drain_s,
        max_queue=settings.max_queue,
        max_queue_tokens=settings.max_queue_tokens,
        max_queue_wait_s=settings.max_queue_wait_s,
        histogram_latencies=read_metrics_config(settings.metrics_config)["histogram_latencies"],
        rate_limiter=settings.rate_limit == "execution_count",
        resources=tuple(map(_capacity, settings.rate_limit_resources)),
    )


def _capacity(text: str) -> ResourceCapacity:
    try:
        return ResourceCapacity.parse(text)
    except ValueError as error:
        raise GenserveError(str(error), remedy="write for example --rate-limit-resource R1:4") from error
