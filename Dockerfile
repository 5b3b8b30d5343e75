# docker build --build-arg RUNTIME=cpu --tag genserve .          (or RUNTIME=gpu); needs BuildKit, as Docker 23 has
# docker run --rm -v models:/models -e GENSERVE_API_KEY=... -p 8000:8000 -p 8001:8001 genserve serve smollm2
#     (8000 HTTP, 8001 gRPC, 8002 metrics; without a key: -e GENSERVE_ALLOW_UNAUTHENTICATED=true, and -p 127.0.0.1:8000:8000)
#
# compose.yaml does the same. The image has what serving needs, without torch; exports run elsewhere.
# On a GPU, with RUNTIME=gpu: `genserve pull smollm2 --precision fp16`, and `docker run --gpus all ...`.

# The release of Debian is pinned, because a tag without it moves to the next release.
ARG PYTHON=python:3.12-slim-bookworm

# The wheel. A release brings its own instead: `--build-context wheel=FOLDER`, with FOLDER/dist/*.whl.
FROM ${PYTHON} AS wheel
WORKDIR /src
COPY hatch_build.py pyproject.toml README.md LICENSE constraints.txt ./
COPY genserve genserve
RUN PIP_BUILD_CONSTRAINT=constraints.txt pip wheel --no-cache-dir --no-deps --wheel-dir /dist .


FROM ${PYTHON} AS install
ARG RUNTIME=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/constraints.txt
COPY constraints.txt /
RUN python -m venv /opt/genserve
ENV PATH=/opt/genserve/bin:$PATH
# Then its dependencies. The build of ONNX Runtime for GPUs takes the place of the other one (docs/install.md). The
# only CUDA libraries in the image are those that pip installs; the driver is the host's.
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip install --no-index --no-deps --find-links /dist genserve && \
    if [ "$RUNTIME" = gpu ]; then \
        pip install 'genserve[gpu,otel]' && pip uninstall --yes onnxruntime && \
        pip install --force-reinstall --no-deps onnxruntime-gpu; \
    else \
        pip install 'genserve[otel]'; \
    fi
RUN python -m venv /opt/sbom && /opt/sbom/bin/pip install cyclonedx-bom && \
    /opt/sbom/bin/cyclonedx-py environment /opt/genserve --output-file /opt/genserve/sbom.cdx.json


FROM ${PYTHON}
RUN useradd --create-home --uid 1000 genserve && \
    install --directory --owner=genserve --group=genserve /models
COPY --from=install /opt/genserve /opt/genserve
ENV PATH=/opt/genserve/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    GENSERVE_HOST=0.0.0.0 \
    GENSERVE_HTTP_PORT=8000 \
    GENSERVE_MODEL_REPOSITORY=/models
USER 1000
WORKDIR /home/genserve
VOLUME /models
EXPOSE 8000 8001 8002
# Large weights take minutes to load; failures during that time do not count.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "import os, ssl, urllib.request as r; scheme = 'https' if os.environ.get('GENSERVE_SSL_CERTFILE') else 'http'; r.urlopen(f'{scheme}://127.0.0.1:{os.environ[\"GENSERVE_HTTP_PORT\"]}/health', timeout=4, context=ssl._create_unverified_context())"]
ENTRYPOINT ["genserve"]
CMD ["serve"]
