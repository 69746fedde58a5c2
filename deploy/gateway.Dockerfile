# The gateway: protocols, admission, batching, admin API. Build from the project's root:
#   docker build -f deploy/gateway.Dockerfile -t millrace-gateway .

FROM python:3.12.12-slim-bookworm AS build
RUN python -m venv /opt/venv
# The worker's lock, not a smaller one: the check of an upload loads the model.
COPY deploy/locks/cpu.txt /tmp/lock.txt
RUN /opt/venv/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r /tmp/lock.txt

FROM python:3.12.12-slim-bookworm
RUN groupadd --gid 10001 millrace \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/millrace --shell /usr/sbin/nologin millrace \
    && install -d -o millrace -g millrace /var/lib/millrace
COPY --from=build /opt/venv /opt/venv
COPY services /opt/millrace/services
COPY gateway /opt/millrace/gateway
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MILLRACE_HOME=/var/lib/millrace \
    MILLRACE_HOST=0.0.0.0 \
    MILLRACE_HTTP_PORT=8000 \
    MILLRACE_GRPC_PORT=8001
WORKDIR /opt/millrace
USER 10001:10001
EXPOSE 8000 8001
# Alive, not ready: readiness waits for workers, which wait for this.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v2/health/live', timeout=2)"]
ENTRYPOINT ["python", "-m", "gateway"]
