"""Graphs: versions that run other versions, step by step."""

from millstream.services.plugin.plugin import Format, Plugin

PLUGIN = Plugin(
    name="graphs",
    extras={"graphs": ("yaml",)},
    formats=(
        Format(
            name="graph",
            recognises="millstream.plugins.graphs.forms:is_graph_file",
            inspect="millstream.plugins.graphs.inspection:inspect",
            backend="",
            platform="ensemble",
            platform_backend="",
            file="graph.yaml",
            composer="millstream.plugins.graphs.gateway.composer:COMPOSER",
        ),
    ),
    model_section=("millstream.plugins.graphs.gateway.step_statistics:graph_of",),
)
