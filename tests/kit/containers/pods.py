"""Runs the pods of an overlay of deploy/kubernetes as processes of this machine. Pods have no memory in common."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.kit.containers.host import Container, Host, Running
from tests.kit.containers.image import product_image, valkey_image
from tests.kit.containers.kubernetes import build, container, of_kind, probe
from tests.kit.wait import wait_until

URL = "http://127.0.0.1:8000"
KEY = "a-key-of-the-secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
ACCESS_SECRET = "an access secret of 32 characters, or more"


class Pods:
    """The pods of an overlay, each started when those before it are ready."""

    def __init__(self, folder: Path, overlay: str) -> None:
        self.objects = build(overlay)
        names = tuple(item["metadata"]["name"] for item in of_kind(self.objects, "Service"))
        self.host = Host(folder, names)
        self.secret("millstream-admin-key", "admin_key", KEY)
        self.secret("millstream-access-secret", "access_secret", ACCESS_SECRET)
        gateway = product_image("gateway", folder / "gateway")
        self.images = {
            "millstream-redis": valkey_image(folder / "valkey"),
            "millstream-gateway": gateway,
            "millstream-controller": gateway,
            "millstream-worker-cpu": product_image("worker-cpu", folder / "worker"),
        }

    def secret(self, name: str, key: str, value: str) -> Path:
        """Make a Secret; return the folder that pods mount."""
        folder = self.host.volume(f"secret-{name}", "0:0")
        (folder / key).write_text(value)
        return folder

    def replica(self, name: str, port: int, secrets: Path | None = None) -> Container:
        """Return a further gateway at a port of its own, since pods share a network here.

        Args:
            secrets: folder in the place of the access secret's; None: the same.
        """
        first = container(self.host, self.objects, "millstream-gateway", self.images["millstream-gateway"])
        ports = {"MILLSTREAM_HTTP_PORT": str(port), "MILLSTREAM_GRPC_PORT": str(port + 1)}
        mounts = tuple(
            replace(mount, source=secrets) if secrets and mount.target == "/etc/millstream-access" else mount
            for mount in first.mounts
        )
        return replace(first, name=name, environment={**first.environment, **ports}, mounts=mounts)

    def start(self, name: str) -> Running:
        running = self.host.start(container(self.host, self.objects, name, self.images[name]))
        self.wait(name, "startupProbe")
        self.wait(name, "readinessProbe")
        return running

    def spec(self, name: str) -> dict[str, object]:
        item = next(one for one in of_kind(self.objects, "Deployment") if one["metadata"]["name"] == name)
        spec: dict[str, object] = item["spec"]["template"]["spec"]
        return spec

    def wait(self, name: str, kind: str) -> None:
        found = self.spec(name)["containers"]
        assert isinstance(found, list)
        running, command = self.host.running[name], probe(found[0], kind)

        def succeeds() -> bool:
            assert running.process.poll() is None, self.output()
            return running.run(*command).returncode == 0

        wait_until(succeeds, what=f"{kind} of {name}")

    def output(self) -> str:
        return "\n".join(f"{name}: {line}" for name, one in self.host.running.items() for line in one.output)
