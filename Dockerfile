# CommitKV on a CPU: the engine behind Triton Inference Server (the server of the nvidia-pytriton wheel).
# Not built or run by us yet: no container engine was at hand. TensorRT images come with the TensorRT target.
FROM python:3.11-slim-bookworm

# g++ compiles the CPU kernels at first use; libgomp serves torch.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make libgomp1 \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home commitkv
USER commitkv
WORKDIR /home/commitkv/app
ENV PYTHONPATH=/home/commitkv/app

COPY --chown=commitkv pyproject.toml constraints.txt Makefile README.md ./
RUN make setup
COPY --chown=commitkv . .

# The engine is built at first start unless one is mounted at engines/.
VOLUME /home/commitkv/app/engines
EXPOSE 8000 8001 8002
HEALTHCHECK --start-period=120s CMD .venv/bin/python -c \
    "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=5)"
CMD ["sh", "-c", ".venv/bin/python builder/build.py && exec .venv/bin/python -m perf.serve --host 0.0.0.0"]
