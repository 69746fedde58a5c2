"""Triton's extensions of the v2 protocol, its model repositories and its configurations."""

from millstream.services.plugin.plugin import Plugin

PLUGIN = Plugin(
    name="triton",
    settings=("millstream.plugins.compat.triton.settings:TritonSettings",),
    preload=("millstream.plugins.compat.triton.cli_repositories:repositories_of",),
    http=("millstream.plugins.compat.triton.gateway_http:ADAPTER",),
    grpc=("millstream.plugins.compat.triton.gateway_grpc:EXTENSIONS",),
    gateway=("millstream.plugins.compat.triton.gateway:build",),
    recorder=("millstream.plugins.compat.triton.traces:build",),
    client_memory=("millstream.plugins.compat.triton.shared_memory:build",),
    metrics_page=("millstream.plugins.compat.triton.metrics:build",),
    importers=("millstream.plugins.compat.triton.python_models:PythonModelImporter",),
    v2_extensions=(
        "model_repository",
        "model_repository(unload_dependents)",
        "model_configuration",
        "system_shared_memory",
        "statistics",
        "trace",
        "logging",
    ),
)
