# A worker on an NVIDIA GPU: CUDA 13 and cuDNN 9, which the locked onnxruntime-gpu is built for. Needs the NVIDIA
# Container Toolkit on the host. Build from the project's root:
#   docker build -f deploy/worker-gpu.Dockerfile -t millstream-worker-gpu .

FROM nvidia/cuda:13.0.2-cudnn-runtime-ubuntu24.04 AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12=3.12.* python3.12-venv=3.12.* \
    && rm -rf /var/lib/apt/lists/*

FROM python AS build
RUN python3.12 -m venv /opt/venv
COPY deploy/locks/worker-gpu.txt /tmp/lock.txt
RUN /opt/venv/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r /tmp/lock.txt

FROM python
RUN groupadd --gid 10001 millstream \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/millstream --shell /usr/sbin/nologin millstream \
    && install -d -o millstream -g millstream /var/lib/millstream
COPY --from=build /opt/venv /opt/venv
COPY src/millstream/__init__.py /opt/millstream/millstream/__init__.py
COPY services /opt/millstream/millstream/services
COPY workers /opt/millstream/millstream/workers
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    CUDA_CACHE_PATH=/tmp/cuda-cache \
    MILLSTREAM_HOME=/var/lib/millstream \
    MILLSTREAM_WORKER_DEVICE=cuda:0 \
    MILLSTREAM_WORKER_METRICS_PORT=9100
WORKDIR /opt/millstream
USER 10001:10001
EXPOSE 9100
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9100/metrics', timeout=2)"]
ENTRYPOINT ["python", "-m", "millstream.workers"]
CMD ["--pool", "gpu"]
