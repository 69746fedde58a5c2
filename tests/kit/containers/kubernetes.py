"""Builds the overlays of deploy/kubernetes with kubectl, and says what a node is told of each pod."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.kit.containers.dockerfile import ROOT
from tests.kit.containers.host import Container, Host, Mount
from tests.kit.containers.image import Image

KUBECTL = Path(sys.executable).parent / "kubectl"
FOLDER = ROOT / "deploy/kubernetes"
OVERLAYS = sorted(path.parent.name for path in FOLDER.glob("overlays/*/kustomization.yaml"))


def build(overlay: str) -> list[dict[str, Any]]:
    """Return the objects of an overlay."""
    return build_folder(FOLDER / "overlays" / overlay)


def build_folder(folder: Path) -> list[dict[str, Any]]:
    """Return the objects of a folder with a kustomization.yaml."""
    command = (KUBECTL, "kustomize", folder)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # kustomize warns of what is deprecated
    return list(yaml.safe_load_all(done.stdout))


def of_kind(objects: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] in kinds]


def variables(objects: list[dict[str, Any]], container: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a container: those of its config maps, then its own."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        name = source["configMapRef"]["name"]
        found |= next(item["data"] for item in of_kind(objects, "ConfigMap") if item["metadata"]["name"] == name)
    return found | {entry["name"]: entry["value"] for entry in container.get("env", [])}


def container(host: Host, objects: list[dict[str, Any]], name: str, image: Image) -> Container:
    """Return what a node is told of the only container of a Deployment.

    A secret is the volume `secret-NAME` of the host.
    """
    deployment = next(item for item in of_kind(objects, "Deployment") if item["metadata"]["name"] == name)
    pod = deployment["spec"]["template"]["spec"]
    (found,) = pod["containers"]
    rights = found["securityContext"]
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}
    # `command` replaces the entrypoint, and with it the image's command; `args` replaces the command alone.
    entrypoint = found.get("command", image.entrypoint)
    arguments = found.get("args", () if "command" in found else image.command)
    user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts, temporary = [], {}
    for mount in found["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "emptyDir" in volume:
            size = volume["emptyDir"]["sizeLimit"].removesuffix("i")
            temporary[mount["mountPath"]] = f"mode=1777,size={size}"
        elif "secret" in volume:
            folder = host.volume(f"secret-{volume['secret']['secretName']}", "0:0")
            mounts.append(Mount(folder, mount["mountPath"], read_only=True))
        else:
            claim = volume["persistentVolumeClaim"]["claimName"]
            mounts.append(Mount(host.volume(claim, user), mount["mountPath"], mount.get("readOnly", False)))
    return Container(
        name=name,
        image=image,
        command=(*entrypoint, *arguments),
        environment=variables(objects, found),
        user=user,
        mounts=tuple(mounts),
        temporary=temporary,
        read_only=rights["readOnlyRootFilesystem"],
        groups=str(pod["securityContext"].get("fsGroup", "")),
        health=probe(found, "livenessProbe"),
    )


def probe(container: dict[str, Any], kind: str) -> tuple[str, ...]:
    """Return a command that does what a probe does: with status 0 if it succeeds."""
    found = container[kind]
    if "exec" in found:
        return tuple(found["exec"]["command"])
    port = next(item["containerPort"] for item in container["ports"] if item["name"] == found["httpGet"]["port"])
    url = json.dumps(f"http://127.0.0.1:{port}{found['httpGet']['path']}")
    return ("python", "-c", f"import urllib.request as r; r.urlopen({url}, timeout={found['timeoutSeconds']})")
