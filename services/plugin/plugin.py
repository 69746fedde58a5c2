"""The record by which a plug-in says what it adds. Pure: a record imports nothing of what it names.

entry point of the group `millstream.plugins` ─> PLUGIN = Plugin(…) ─> registry.contributions(kind, Type) ─> the core

A plug-in is a folder: `plugin.py` holds its record, and its other modules are imported when a process first uses what
they add. The type of each contribution is defined where the core uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of the command line.

    Args:
        name: the first word after `millstream`.
        panel: its section in `millstream --help`: "Run", "Models" or "Use".
        function: "module:function" of the command, imported when it is called.
        examples: shown at the end of its help.
    """

    name: str
    panel: str
    function: str
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A library that workers run models with.

    Args:
        name: as in `--pool gpu=1,backend=NAME`.
        factory: "module:function" that takes a folder for files that it keeps, or None, and returns a
            workers/backends/base.Backend.
        extra: of `pip install millstream[…]`, which installs the library; empty: none does.
        pools: whether a pool can be of it; else it runs what is compiled for it alone.
        beside: whether its instances live in processes of their own, so that workers of every CPU pool load its
            formats, too, beside those of their own backend.
    """

    name: str
    factory: str
    extra: str = ""
    pools: bool = True
    beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of its own, beside gateways and workers: `python -m millstream.services.plugin NAME`.

    Args:
        name: for that command.
        module: runs as `python -m` does.
    """

    name: str
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of models that is served as it is, beside ONNX.

    Args:
        name: as in manifests: "torch-export".
        recognises: "module:function" that says of a path whether the file's content is of it; standard library alone.
        inspect: "module:function" of (CheckTask, Path) that returns a CheckedModel; runs in the sandbox of the check.
        backend: that loads it; empty: gateways run it, with `composer`.
        platform: its name in Triton's protocol, as `platform_backend` is that of its backend.
        file: what an upload of it is called in its version; empty: importers alone make it.
        composer: "module:object" of versions that run other versions (gateway/scheduling/composed.Composer).
    """

    name: str
    recognises: str
    inspect: str
    backend: str
    platform: str
    platform_backend: str
    file: str = ""
    composer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a container platform wants of `millstream serve`. None, and an empty text: nothing.

    Args:
        port: to listen on.
        uri: of the folder of the models.
        name: of the model, if it is one.
        by_calls: whether models come by calls, so that there need be none at the start.
    """

    port: int | None = None
    uri: str = ""
    name: str = ""
    by_calls: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """What a plug-in adds. A text is "module:attribute", imported when a process first asks for that kind.

    Args:
        name: lower case, as in MILLSTREAM_PLUGINS.
        requires: modules of other distributions. A plug-in that lacks one is off, and `doctor` says what is missing.
        needs: names of plug-ins without which it is off.
        extras: of `pip install millstream[…]`, with the modules that each installs, as far as they are imported.
        backends: of workers.
        formats: of models.
        importers: of models of other frameworks, in the order in which they are asked
            (services/ingest/importers.Importer).
        file_kinds: that no importer takes, for refusals (services/ingest/file_kind.FileKinds).
        upload_checks: coroutine functions of the folder of an uploaded model, which raise Failure(INVALID).
        provers: of independent rows (services/ingest/proof.Prover); the first counts.
        targets: tuples of what the plug-in compile compiles for (plugins/compile/targets/base.Target).
        commands: of the command line.
        settings: classes of pydantic, whose fields are settings (services/settings.settings_class).
        preload: functions of the settings that say what to load at the start (services/cli/preload.Preloading).
        serve: functions of the settings that say what a platform wants of a container (Serving).
        http: routes of a protocol (gateway/http/adapter.Adapter).
        grpc: methods of a service (gateway/grpc/methods/service.GrpcService).
        credentials: how callers without a key of ours are known (gateway/http/auth.Credentials).
        gateway: builders of a part of each gateway (gateway/parts.py).
        preparer: builders of what makes tensors of texts and encoded files (gateway/parts.py: Preparer).
        recorder: builders of what records requests (gateway/observing/observer.py).
        client_memory: builder of the memory that clients pass tensors in (gateway/tensors/output_options.py).
        metrics_page: builders of functions that return further lines of the metrics page (gateway/metrics_page.py).
        v2_extensions: names of extensions that the metadata of the v2 protocol lists.
        supervisor: builders of a part of a machine's supervisor (services/supervisor/parts.py).
        process: programs that an operator may start.
        devices: functions that return checks of `millstream doctor devices` (services/cli/doctor/machine.Check).
        model_section: functions of Deps and a manifest that return fields of the page of a version.
        worker: builders of a part of each worker (workers/parts.py).
    """

    name: str
    requires: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    backends: tuple[Backend, ...] = ()
    formats: tuple[Format, ...] = ()
    importers: tuple[str, ...] = ()
    file_kinds: tuple[str, ...] = ()
    upload_checks: tuple[str, ...] = ()
    provers: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    commands: tuple[Command, ...] = ()
    settings: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    serve: tuple[str, ...] = ()
    http: tuple[str, ...] = ()
    grpc: tuple[str, ...] = ()
    credentials: tuple[str, ...] = ()
    gateway: tuple[str, ...] = ()
    preparer: tuple[str, ...] = ()
    recorder: tuple[str, ...] = ()
    client_memory: tuple[str, ...] = ()
    metrics_page: tuple[str, ...] = ()
    v2_extensions: tuple[str, ...] = ()
    supervisor: tuple[str, ...] = ()
    process: tuple[Process, ...] = ()
    devices: tuple[str, ...] = ()
    model_section: tuple[str, ...] = ()
    worker: tuple[str, ...] = ()
