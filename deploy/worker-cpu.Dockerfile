# A worker on CPUs. Build from the project's root:
#   docker build -f deploy/worker-cpu.Dockerfile -t millstream-worker-cpu .

FROM python:3.12.12-slim-bookworm AS build
RUN python -m venv /opt/venv
COPY deploy/locks/worker-cpu.txt /tmp/lock.txt
RUN /opt/venv/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r /tmp/lock.txt

FROM python:3.12.12-slim-bookworm
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
    MILLSTREAM_HOME=/var/lib/millstream \
    MILLSTREAM_WORKER_DEVICE=cpu \
    MILLSTREAM_WORKER_METRICS_PORT=9100
WORKDIR /opt/millstream
USER 10001:10001
EXPOSE 9100
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9100/metrics', timeout=2)"]
ENTRYPOINT ["python", "-m", "millstream.workers"]
CMD ["--pool", "cpu"]
