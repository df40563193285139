# CommitKV on a GPU: the engine behind the Triton Inference Server of NVIDIA's image, in which TensorRT-LLM lives too.
#
#   docker build -t commitkv:0.1.0 .
#   docker run --gpus 1 --shm-size 1g -p 127.0.0.1:8000-8002:8000-8002 -v commitkv-engines:/engines commitkv:0.1.0
#
# Not built and not run by us: no container engine and no GPU were at hand. Checked: hadolint, and a test that what this
# file names exists (tests/runtime/deploy/test_dockerfiles.py).
#
# 26.07 is the newest release that NVIDIA's compatibility table lists with TensorRT-LLM: Triton 2.71, Python 3.12,
# CUDA 13.1, TensorRT-LLM 1.2.1 with TensorRT 10.14, all in the system's Python. Ours, with TensorRT 11.4, is a virtual
# environment beside it: neither sees the other's packages, and the libraries of the two TensorRTs have different names.
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3
# hadolint ignore=DL3006
FROM ${TRITON_IMAGE}

# g++ compiles the CPU forms of our kernels at first use; the CUDA kernels need no compiler but NVRTC's wheel.
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/commitkv
COPY pyproject.toml constraints.txt README.md ./
# The CUDA build of torch brings NVIDIA's libraries at versions of its own, so their pins are left out. The libraries of
# TensorRT come from NVIDIA's package index, to which the package tensorrt-cu13 leads.
RUN python3 -m venv /opt/venv \
    && grep --invert-match --ignore-case --extended-regexp '^(nvidia|cuda|tensorrt)' constraints.txt > /tmp/constraints.txt \
    && /opt/venv/bin/python -m pip install --no-cache-dir --constraint /tmp/constraints.txt '.[serve,kernels,h100]' \
    && rm /tmp/constraints.txt

# Code that the server's user can read and not change.
COPY . .
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/opt/commitkv \
    PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/cache
# The user triton-server of NVIDIA's images has the id 1000.
RUN mkdir --parents /engines /checkpoints /cache /opt/commitkv/models \
    && chown 1000:1000 /engines /checkpoints /cache /opt/commitkv/models
USER 1000:1000

# Engines that were built or are mounted; conversations between turns; compiled kernels.
VOLUME ["/engines", "/checkpoints", "/cache"]
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=6s --start-period=30m --retries=6 CMD ["python", "-c", \
    "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=5)"]

# NVIDIA's entry point stays. An H100 is 90; others: A100 80, L40S 89, RTX PRO 6000 Blackwell 120.
CMD ["/opt/commitkv/runtime/deploy/start.sh", "/engines/smollm2-135m-sm90", "--target=trt", "--sm=90", "--", \
    "--device=cuda", "--host=0.0.0.0", "--checkpoints=/checkpoints", "--checkpoint-wait-s=2", "--log=/dev/stdout"]
