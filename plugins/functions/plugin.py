"""Functions of Python as models, in processes of their own."""

from millstream.services.plugin.plugin import Backend, Format, Plugin

PLUGIN = Plugin(
    name="functions",
    extras={"functions": ("uv",)},
    metrics_page=("millstream.plugins.functions.model_metrics:metrics_page",),
    backends=(Backend(name="python", factory="millstream.plugins.functions.worker:Python", beside=True),),
    formats=(
        Format(
            name="python",
            recognises="millstream.plugins.functions.inspection:is_document",
            inspect="millstream.plugins.functions.inspection:inspect",
            backend="python",
            platform="python",
            platform_backend="python",
        ),
        Format(
            name="triton-python",
            recognises="millstream.plugins.functions.inspection:is_document",
            inspect="millstream.plugins.functions.inspection:inspect",
            backend="python",
            platform="",
            platform_backend="python",
            file="model.py",
        ),
    ),
    file_kinds=("millstream.plugins.functions.importer:KINDS",),
    importers=(
        "millstream.plugins.functions.importer:FunctionImporter",
        "millstream.plugins.functions.stand_ins:HandlerStandIn",
        "millstream.plugins.functions.stand_ins:PickleStandIn",
        "millstream.plugins.functions.stand_ins:PyfuncStandIn",
    ),
    http=("millstream.plugins.functions.gateway.function_page:ADAPTER",),
    model_section=("millstream.plugins.functions.gateway.function_page:function_of",),
)
