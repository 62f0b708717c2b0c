# For CPUs:  docker build -t tokencredit .
# For GPUs:  docker build -t tokencredit --build-arg BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime .
# Train:     docker run --rm -v "$PWD/runs:/train/runs" tokencredit train --run.dir runs/first     (GPUs: --gpus all)
ARG BASE=python:3.12-slim
FROM ${BASE}

# A build of torch that the base image has already, of the same version, stays.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=compare,control,datasets,peft,tensorboard
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

WORKDIR /tokencredit
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN python -m pip install --extra-index-url "${TORCH_INDEX}" --constraint constraints.txt ".[${EXTRAS}]"

# Not as root: a run may execute reward functions and environments of its user.
RUN useradd --create-home tokencredit && install -d -o tokencredit /train /train/runs
USER tokencredit
WORKDIR /train
ENTRYPOINT ["tokencredit"]
CMD ["--help"]
