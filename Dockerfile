# docker build --build-arg RUNTIME=cpu --tag genserve .          (or RUNTIME=gpu)
# docker run --rm -v models:/models genserve pull smollm2
# docker run --rm -v models:/models -e GENSERVE_API_KEY=... -p 8000:8000 -p 8001:8001 genserve
#     (8000 HTTP, 8001 gRPC, 8002 metrics; without a key: -e GENSERVE_ALLOW_UNAUTHENTICATED=true, and -p 127.0.0.1:8000:8000)
#
# On a GPU, with RUNTIME=gpu: `genserve pull smollm2 --precision fp16`, and `docker run --gpus all ...`.

# The release of Debian is pinned, because a tag without it moves to the next release.
ARG PYTHON=python:3.12-slim-bookworm

FROM ${PYTHON} AS build
ARG RUNTIME=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/genserve
ENV PATH=/opt/genserve/bin:$PATH
WORKDIR /src

COPY constraints.txt ./
COPY hatch_build.py pyproject.toml README.md LICENSE ./
COPY genserve genserve
# The only CUDA libraries in the image are those that pip installs here; the driver is the host's.
ENV PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt
RUN if [ "$RUNTIME" = gpu ]; then \
        pip install '.[gpu,otel]' && pip uninstall --yes onnxruntime && \
        pip install --force-reinstall --no-deps onnxruntime-gpu; \
    else \
        pip install '.[otel]'; \
    fi


FROM ${PYTHON}
RUN useradd --create-home --uid 1000 genserve && \
    install --directory --owner=genserve --group=genserve /models
COPY --from=build /opt/genserve /opt/genserve
ENV PATH=/opt/genserve/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    GENSERVE_HOST=0.0.0.0 \
    GENSERVE_HTTP_PORT=8000 \
    GENSERVE_MODEL_REPOSITORY=/models
USER genserve
WORKDIR /home/genserve
VOLUME /models
EXPOSE 8000 8001 8002
# Large weights take minutes to load; failures during that time do not count.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "import os, ssl, urllib.request as r; scheme = 'https' if os.environ.get('GENSERVE_SSL_CERTFILE') else 'http'; r.urlopen(f'{scheme}://127.0.0.1:{os.environ[\"GENSERVE_HTTP_PORT\"]}/health', timeout=4, context=ssl._create_unverified_context())"]
ENTRYPOINT ["genserve"]
CMD ["serve"]
