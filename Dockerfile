# The server in a container. It computes on a GPU if the container has one, else on the CPU. It runs as any user, with a
# read-only root, and writes only to /cache (models, compiled kernels, tuning) and /tmp. Because it listens on all
# addresses, it refuses to start without INFERD_API_KEY.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# torch's default wheel for Linux includes CUDA, which GPUs need, and is 3 GB. For an image without GPU support, use the
# index of PyTorch's CPU wheels: docker build --build-arg TORCH_INDEX_URL=...
ARG TORCH_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN ["python", "-m", "venv", "/opt/inferd"]
WORKDIR /src
COPY constraints.txt ./
RUN /opt/inferd/bin/pip install --constraint constraints.txt ${TORCH_INDEX_URL:+--extra-index-url "${TORCH_INDEX_URL}"} torch
COPY pyproject.toml setup.py README.md LICENSE ./
COPY inferd inferd
COPY server server
COPY engine engine
COPY kernels kernels
RUN /opt/inferd/bin/pip install --constraint constraints.txt .
# Build the C++ kernels for every instruction set that a host may have: the final image has no C++ compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && /opt/inferd/bin/python -m inferd.kernels.native

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="inferd" \
      org.opencontainers.image.description="An OpenAI-compatible LLM serving daemon" \
      org.opencontainers.image.licenses="Apache-2.0"
# Triton compiles kernels for the GPU that it finds. It needs this C compiler for the code that launches each kernel.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/inferd /opt/inferd
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
USER 10001:0
WORKDIR /cache
# Without this check, kernels that this user cannot load would only make the server slow.
RUN ["python", "-m", "inferd.kernels.native", "--check"]
EXPOSE 8000
# /health answers 503 until the model is loaded, and while the server drains.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ['INFERD_PORT'] + '/health', timeout=4)"]
ENTRYPOINT ["inferd"]
CMD ["serve"]
