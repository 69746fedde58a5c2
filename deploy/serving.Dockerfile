# Everything of one machine in one image, for KServe and SageMaker. Build from the project's root:
#   docker build -f deploy/serving.Dockerfile -t millstream .
#   docker run -p 8080:8080 millstream                                        up, with no models yet
#   docker run -p 8080:8080 -v ./repository:/opt/ml/model:ro millstream serve  as SageMaker starts it

FROM python:3.12.12-slim-bookworm AS build
RUN python -m venv /opt/venv
COPY deploy/locks/serving.txt /tmp/lock.txt
RUN /opt/venv/bin/pip install --no-cache-dir --require-hashes --only-binary :all: -r /tmp/lock.txt

FROM python:3.12.12-slim-bookworm
RUN groupadd --gid 10001 millstream \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/millstream --shell /usr/sbin/nologin millstream \
    && install -d -o millstream -g millstream /var/lib/millstream
COPY --from=build /opt/venv /opt/venv
COPY src/millstream/__init__.py /opt/millstream/millstream/__init__.py
COPY services /opt/millstream/millstream/services
COPY gateway /opt/millstream/millstream/gateway
COPY workers /opt/millstream/millstream/workers
# PYTHONPATH: the supervisor starts its children without the folder that it was started in.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/opt/millstream \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MILLSTREAM_HOME=/var/lib/millstream \
    MILLSTREAM_PRELOAD_EXAMPLE=false \
    MILLSTREAM_HOST=0.0.0.0 \
    MILLSTREAM_HTTP_PORT=8080 \
    MILLSTREAM_GRPC_PORT=9000
WORKDIR /opt/millstream
USER 10001:10001
EXPOSE 8080 9000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/v2/health/ready', timeout=2)"]
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true \
    com.amazonaws.sagemaker.capabilities.multi-models=true
ENTRYPOINT ["python", "-m", "millstream.services.cli"]
CMD ["up"]
