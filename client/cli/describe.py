"""`millstream describe`: shows one model in detail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from millstream.client.cli.options import Endpoint, Json, Key, Name, open_client

if TYPE_CHECKING:
    from rich.console import Console

    from millstream.client.documents import (
        ImportedModel,
        ListedVersion,
        Model,
        RaceSummary,
        StepMeasured,
        Tensor,
        Version,
    )


def describe(
    context: typer.Context, name: Name, json_output: Json = False, endpoint: Endpoint = None, key: Key = None
) -> None:
    """Show a model: its versions, signature, state on each worker and measured execution times."""
    from millstream.client.cli.terminal import emit, escape, labels_text, results

    with open_client(context, endpoint, key) as client:
        model, url = client.model(name), client.url
    if json_output:
        emit(model)
        return
    console = results()
    serving = model["serving"]
    console.print(
        f"[bold]{escape(model['name'])}[/]  "
        + (f"version {serving} is serving" if serving is not None else "[yellow]no version is serving[/]")
    )
    if model["source"]:
        console.print(f"served in place from {escape(model['source'])}")
    if owner := model.get("owner"):
        console.print(f"owner {escape(owner)}")
    if labels := model.get("labels"):
        console.print(f"labels {escape(labels_text(labels))}")
    if model["reason"]:
        console.print(f"[red]reason[/] {escape(model['reason'])}")
    if model["unloaded"]:
        console.print(f"unloaded: `millstream load {escape(model['name'])}` serves it again")
    elif model["active"] not in {None, serving}:
        console.print(f"version {model['active']} takes over when it is ready")
    for version in reversed(model["versions"]):
        _show(console, version)
    if serving is not None:
        _show_calls(console, url, model)


def _show_calls(console: Console, url: str, model: Model) -> None:
    from millstream.client.cli.inputs import calls_of

    usage = next((one.get("usage") for one in model["versions"] if one["version"] == model["serving"]), None)
    console.print()
    for call in calls_of(url, model["name"], usage):
        console.print(call, style="dim", markup=False, highlight=False, soft_wrap=True)


def tensors(specs: Sequence[Tensor]) -> str:
    """Format a signature's tensors on one line: label BYTES [-1], logits FP32 [-1, 3] (if named)."""
    return ", ".join(
        f"{spec['name']} {spec['datatype']} {spec['shape']}{' (if named)' if spec.get('on_request') else ''}"
        for spec in specs
    )


def batching(version: Version | ListedVersion) -> str:
    """Describe whether requests to a version share runs, and how that was decided."""
    reason = f": {version['batching_reason']}" if version["batching_reason"] else ""
    if not version["batching"]:
        return f"off{reason}; each request runs alone"
    return f"up to {version['rows_max']} rows per run, {version['batching_decided']}{reason}"


def imported(record: ImportedModel) -> str:
    """Describe what a version was made from, and how well the outputs agree."""
    made = f"from {record['importer']} ({record['producer']})"
    if not record["rows"]:  # the framework itself serves
        return made
    worst = f"output {record['output']} differs most, by {record['difference']:.2g}"
    return f"{made}; {record['rows']} rows compared, {worst}"


def show_signature(console: Console, version: Version | ListedVersion) -> None:
    """Print how a version wants to be called, its tensors, and whether requests share runs."""
    from millstream.client.cli.terminal import escape, show_detail

    usage = version.get("usage")
    if usage and usage["kind"] != "tensors":  # which the next line has
        show_detail(console, "  takes     ", escape(usage["sentence"]))
    show_detail(console, "  inputs    ", escape(tensors(version["inputs"])))
    show_detail(console, "  outputs   ", escape(tensors(version["outputs"])))
    show_detail(console, "  batching  ", escape(batching(version)))


def _show(console: Console, version: ListedVersion) -> None:
    from millstream.client.cli.terminal import ago, escape, show_detail, size, state

    console.print(f"\n[bold]version {version['version'] or '(being uploaded)'}[/]  {state(version['state'])}")
    if version["reason"]:
        style = "yellow" if version["state"] == "standby" else "red"
        show_detail(console, "  reason    ", escape(version["reason"]), style=style)
    if version["digest"] is None:
        return
    show_detail(console, "  file      ", f"{size(version['size_bytes'])}, sha256 {version['digest']}")
    pools = version["pools"]
    what = "pool" if len(pools) == 1 else "pools"
    where = f", for {what} {escape(', '.join(pools))}" if pools else ", run by the gateway"
    show_detail(console, "  uploaded  ", f"{ago(version['created'])}{where}")
    show_signature(console, version)
    _show_parts(console, version)
    if function := version.get("function"):
        packages = ", ".join(function["packages"]) if function["packages"] is not None else "those of the server"
        show_detail(console, "  function  ", escape(f"{function['file']}, {function['python']}, packages {packages}"))
        show_detail(console, "  may       ", escape("; ".join(function["may"])))
    for error in version.get("errors", ()):
        times = f", {error['count']} times" if error["count"] > 1 else ""
        what = f"{ago(error['at'])}{times} in {error['worker']}: {error['text']}"
        show_detail(console, "  error     ", escape(what), style="red")
    for failure in version["load_failures"]:
        what = f"on {failure['kind']}, {ago(failure['failed_at'])}: {failure['reason']}"
        show_detail(console, "  failed    ", escape(what), style="red")
    if version["imported"] is not None:
        show_detail(console, "  imported  ", escape(imported(version["imported"])))
    for note in version["notes"]:
        show_detail(console, "  note      ", escape(note), style="yellow")
    for instance in version["instances"]:
        memory = f", {size(instance['size_bytes'])}" if instance["size_bytes"] else ""
        reason = f": {escape(instance['reason'])}" if instance["reason"] else ""
        served_by = instance.get("variant")
        by = f", by {escape(served_by)}" if served_by else ""
        text = f"{escape(instance['worker'])} {state(instance['state'])}{reason}{memory}{by}"
        show_detail(console, "  worker    ", text)
        if instance["profile"]:
            show_detail(console, "            ", _profile(instance["profile"]))


def _show_parts(console: Console, version: ListedVersion) -> None:
    """Print the steps of a graph, and what was compiled and raced."""
    from millstream.client.cli.terminal import escape, show_detail, size

    for step in _steps(version):
        show_detail(console, "  step      ", escape(step))
    for variant in version["variants"]:
        used = f"not used: {variant['refused']}" if variant["refused"] else size(variant["size_bytes"])
        made = f"{variant['target']} by {variant['runtime']} in {variant['seconds']:g} s for {variant['device']}"
        show_detail(console, "  compiled  ", escape(f"{made}; {used}"))
    for race in version.get("races", ()):
        show_detail(console, "  raced     ", escape(_raced(race)), style="red" if race["undone"] else "")


def _steps(version: ListedVersion) -> Iterator[str]:
    """Yield the steps of a graph, each with what was measured: "detect: detector v3 (image = image) if rows(x) > 0"."""
    document = (version.get("graph") or {}).get("steps", {})
    for step in version.get("steps", ()):
        of = document.get(step["step"], {})
        inputs = ", ".join(f"{name} = {' or '.join(sources)}" for name, sources in of.get("inputs", {}).items())
        condition = f" if {of['if']}" if of.get("if") else ""
        yield f"{step['step']}: {step['model']} v{step['version']} ({inputs}){condition}"
        if measured := step.get("measured"):
            yield f"  {_measured(measured)}"


def _measured(step: StepMeasured) -> str:
    """Return what was measured of a step: 12 answered, half within 2 ms, 99 % within 5 ms; …"""
    from millstream.client.cli.terminal import duration

    parts = [f"{step['answered']} answered"]
    if step["p50_s"] is not None and step["p99_s"] is not None:
        parts[0] += f", half within {duration(step['p50_s'])}, 99 % within {duration(step['p99_s'])}"
    if step["queue_s"] is not None and step["run_s"] is not None:
        parts.append(f"on average {duration(step['queue_s'])} until the run, which took {duration(step['run_s'])}")
    parts += [f"{count} failed: {code}" for code, count in sorted(step["failed"].items())]
    parts += [f"{step[name]} {name}" for name in ("skipped", "withdrawn") if step[name]]
    return "; ".join(parts)


def _raced(race: RaceSummary) -> str:
    """Return what a race found: openvino-bf16-1a2b3c4d on onnxruntime.cpu, 2.1 times as fast."""
    if race["state"] != "decided":
        return f"{race['state']} on {race['kind']}"
    if race["winner"] is None:
        return f"on {race['kind']}: its own file serves, nothing was faster"
    undone = f"; undone: {race['undone']}" if race["undone"] else "" if race["serving"] else "; not serving"
    return f"{race['winner']} on {race['kind']}, {race['ratio']:.2f} times as fast{undone}"


def _profile(profile: dict[str, float]) -> str:
    from millstream.client.cli.terminal import duration

    parts = [f"{rows} in {duration(profile[rows])}" for rows in sorted(profile, key=int)]
    return "rows: " + ", ".join(parts)
