# The server in a container. It computes on a GPU if the container has one, else on the CPU. It runs as any user, with a
# read-only root, and writes only to /cache (models, compiled kernels, tuning) and /tmp. Because it listens on all
# addresses, it refuses to start without INFERD_API_KEY.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS dependencies
# torch's default wheel for Linux includes CUDA and brings Triton, which GPUs need: several GB. For an image without GPU
# support, use the index of PyTorch's CPU wheels: deploy/build.sh
# --build-arg TORCH_INDEX_URL=URL
ARG TORCH_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN ["python", "-m", "venv", "/opt/inferd"]
WORKDIR /src
COPY constraints.txt ./
RUN /opt/inferd/bin/pip install --no-compile --constraint constraints.txt \
        ${TORCH_INDEX_URL:+--extra-index-url "${TORCH_INDEX_URL}"} torch
COPY pyproject.toml ./
# Only pyproject.toml and constraints.txt decide about this layer, so a change of the sources keeps it. torch's headers,
# tests and programs are 190 MB that no server reads; of the programs it needs torch_shm_manager. Bytecode of packages
# that a start does not import would be another 100 MB.
# hadolint ignore=DL3003
RUN /opt/inferd/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > requirements.txt \
    && /opt/inferd/bin/pip install --no-compile --constraint constraints.txt --requirement requirements.txt \
    && cd /opt/inferd/lib/python3*/site-packages \
    && rm -rf torch/test torch/include && find torch/bin -type f ! -name torch_shm_manager -delete \
    && { /opt/inferd/bin/python -m compileall -q -x '/(pip|setuptools|sympy|triton|transformers/models|torch/(_inductor|onnx|testing))/' . \
        || echo 'a file has no bytecode'; }

FROM dependencies AS build
# Build the C++ kernels for every instruction set that a host may have: the final image has no C++ compiler. Only a
# change of the kernels repeats these minutes.
# Debian keeps one version of a package, so none can be pinned.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY inferd inferd
COPY kernels kernels
RUN ["/opt/inferd/bin/python", "-m", "inferd.kernels.cpu.library"]
COPY setup.py README.md LICENSE ./
COPY server server
COPY engine engine
# /product is laid over /opt/inferd below, so that the sources have a layer of their own.
RUN /opt/inferd/bin/pip install --constraint constraints.txt --no-deps --prefix /product . \
    && cp -r kernels/cpu/built /product/lib/python3*/site-packages/inferd/kernels/cpu/

FROM build AS sbom
# The image's Python packages with their versions and licenses, in CycloneDX's format.
RUN cp -r /product/. /opt/inferd/ \
    && python -m venv /opt/sbom && /opt/sbom/bin/pip install --constraint constraints.txt cyclonedx-bom==7.5.0 \
    && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --of JSON -o /sbom.cdx.json /opt/inferd/bin/python

FROM ${PYTHON_IMAGE}
ARG REVISION=unknown
LABEL org.opencontainers.image.title="inferd" \
      org.opencontainers.image.description="An OpenAI-compatible LLM serving daemon" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=dependencies /opt/inferd /opt/inferd
# Triton compiles kernels for the GPU that it finds. It needs this C compiler for the code that launches each kernel.
# torch's CPU build brings no Triton, and its image gets no compiler.
# hadolint ignore=DL3008
RUN if ls -d /opt/inferd/lib/python3*/site-packages/triton >/dev/null 2>&1; then apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi
COPY --from=build /product /opt/inferd
COPY --from=sbom /sbom.cdx.json /opt/inferd/share/sbom.cdx.json
ENV PATH=/opt/inferd/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    XDG_CACHE_HOME=/cache \
    CC=gcc \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    INFERD_HOST=0.0.0.0 \
    INFERD_PORT=8000
# Writable for group 0 and for others: some platforms choose the uid themselves, with group 0 or with any group.
RUN mkdir /cache && chmod 0777 /cache
VOLUME ["/cache"]
WORKDIR /cache
# Without this check, kernels that a user cannot load would only make the server slow. This user has no rights but those
# of all users.
USER 65534:65534
RUN ["python", "-m", "inferd.kernels.cpu.library", "--check"]
USER 10001:0
EXPOSE 8000
# /health answers 503 until the model is loaded, and while the server drains.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ['INFERD_PORT'] + '/health', timeout=4)"]
ENTRYPOINT ["inferd"]
CMD ["serve"]
# Last, because it differs in every commit.
LABEL org.opencontainers.image.revision="${REVISION}"
