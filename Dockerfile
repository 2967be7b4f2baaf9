# syntax=docker/dockerfile:1
# One image for each kind of machine:
#
#   docker build --target cpu  -t torchforge:cpu .
#   docker build --target cuda -t torchforge:cuda .
#   docker build --target rocm -t torchforge:rocm .
#   docker run --rm --shm-size 8g -v "$PWD/runs:/workspace/runs" torchforge:cpu sft apps/sft/tiny.yaml
#
# Weights travel through /dev/shm: it needs room for three versions of them. No variant has been run on a GPU.
ARG PYTHON=3.12

# The wheel, from this checkout.
FROM python:${PYTHON}-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE MANIFEST.in CHANGELOG.md CITATION.cff CONTRIBUTING.md ./
COPY src src
COPY apps apps
RUN pip install --no-cache-dir build==1.6.1 && python -m build --wheel --outdir /dist

# What all variants share: a user of its own, and the working directory of runs.
FROM python:${PYTHON}-slim-bookworm AS base
ENV OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
RUN useradd --uid 1000 --create-home forge && mkdir -p /workspace/runs && chown -R 1000 /workspace
WORKDIR /workspace

# torch comes first, from the index of the variant; the library then finds it installed.
FROM base AS cpu
ARG TORCH=2.13.0
ARG EXTRAS=data,serve
RUN pip install --no-cache-dir "torch==${TORCH}" --index-url https://download.pytorch.org/whl/cpu
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir "$(echo /dist/*.whl)[${EXTRAS}]"
USER 1000
ENTRYPOINT ["forge"]
CMD ["--help"]

# The driver is the host's (--gpus all, nvidia-container-toolkit); torch brings CUDA's libraries.
FROM base AS cuda
ARG TORCH=2.13.0
ARG CUDA=cu130
ARG EXTRAS=data,serve,cluster
RUN pip install --no-cache-dir "torch==${TORCH}" --index-url "https://download.pytorch.org/whl/${CUDA}"
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir "$(echo /dist/*.whl)[${EXTRAS}]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
ENTRYPOINT ["forge"]
CMD ["--help"]

# Run with --device /dev/kfd --device /dev/dri --group-add video; torch brings ROCm's libraries.
FROM base AS rocm
ARG TORCH=2.13.0
ARG ROCM=rocm7.1
ARG EXTRAS=data,serve,cluster
RUN pip install --no-cache-dir "torch==${TORCH}" --index-url "https://download.pytorch.org/whl/${ROCM}"
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir "$(echo /dist/*.whl)[${EXTRAS}]"
USER 1000
ENTRYPOINT ["forge"]
CMD ["--help"]
