# The gateway: protocols, admission, batching, admin API. Build from the project's root:
#   docker build -f deploy/gateway.Dockerfile -t millstream-gateway .

FROM python:3.12.12-slim-bookworm AS build
RUN python -m venv /opt/venv
COPY deploy/locks/gateway.txt /tmp/lock.txt
RUN /opt/venv/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r /tmp/lock.txt

FROM python:3.12.12-slim-bookworm
RUN groupadd --gid 10001 millstream \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/millstream --shell /usr/sbin/nologin millstream \
    && install -d -o millstream -g millstream /var/lib/millstream
COPY --from=build /opt/venv /opt/venv
COPY src/millstream/__init__.py /opt/millstream/millstream/__init__.py
COPY services /opt/millstream/millstream/services
COPY gateway /opt/millstream/millstream/gateway
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MILLSTREAM_HOME=/var/lib/millstream \
    MILLSTREAM_HOST=0.0.0.0 \
    MILLSTREAM_HTTP_PORT=8000 \
    MILLSTREAM_GRPC_PORT=8001
WORKDIR /opt/millstream
USER 10001:10001
EXPOSE 8000 8001
# Alive, not ready: readiness waits for workers, which wait for this.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v2/health/live', timeout=2)"]
ENTRYPOINT ["python", "-m", "millstream.gateway"]
