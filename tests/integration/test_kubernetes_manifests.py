"""The overlays of deploy/kubernetes without a cluster: Kubernetes' schemas, the rules of restricted pods, and what the
product itself says of ports, paths, settings, images and times.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from millstream.services.settings import SECRET_FILES, Settings, settings_class
from millstream.services.version import VERSION
from tests.kit.containers import kubernetes
from tests.kit.containers.dockerfile import ROOT, stage
from tests.kit.containers.kubernetes import FOLDER, KUBECTL, OVERLAYS, of_kind, variables
from tests.kit.prometheus import FOLDER as PROMETHEUS
from tests.kit.prometheus import rules

SCHEMAS = Path(__file__).parent / "schemas"
VERSIONS = ("1.31", "1.37")  # the oldest and the newest Kubernetes that the manifests are held against
OF_OTHERS = {"ScaledObject", "TriggerAuthentication", "ServiceMonitor", "PodMonitor", "PrometheusRule"}
OF_CLUSTER = {"Namespace", "PersistentVolume"}  # they are in no namespace
IMAGES = {"millstream-gateway": "gateway", "millstream-worker-cpu": "worker-cpu", "millstream-worker-gpu": "worker-gpu"}
#: seconds that a process takes to end after it has drained
END_S = 5

pytestmark = pytest.mark.skipif(not KUBECTL.exists(), reason="there is no kubectl for this system")


@cache
def built(overlay: str) -> list[dict[str, Any]]:
    return kubernetes.build(overlay)


def pods(overlay: str) -> dict[str, dict[str, Any]]:
    """The pod templates of an overlay by the name of their Deployment."""
    return {item["metadata"]["name"]: item["spec"]["template"] for item in of_kind(built(overlay), "Deployment")}


def containers(overlay: str) -> dict[str, dict[str, Any]]:
    """The only container of each pod."""
    found = {}
    for name, pod in pods(overlay).items():
        (found[name],) = pod["spec"]["containers"]
    return found


def of_product(overlay: str) -> dict[str, dict[str, Any]]:
    return {name: one for name, one in containers(overlay).items() if one["image"].startswith("millstream-")}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", []))


def test_there_is_an_overlay_for_each_purpose() -> None:
    assert OVERLAYS == ["cpu", "external-redis", "gpu", "hpa", "keda", "monitoring", "one-node", "s3", "tls"]
    components = {path.parent.name for path in FOLDER.glob("components/*/kustomization.yaml")}
    used = {part for overlay in OVERLAYS for part in re.findall(r"components/([\w-]+)", text_of(overlay))}
    assert components == used


def text_of(overlay: str) -> str:
    return (FOLDER / "overlays" / overlay / "kustomization.yaml").read_text()


def test_objects_follow_the_schemas() -> None:
    """Each distinct object once: the schemas are large."""
    distinct = {json.dumps(item, sort_keys=True): item for overlay in OVERLAYS for item in built(overlay)}
    for item in distinct.values():
        if item["kind"] in OF_OTHERS:
            jsonschema.validate(item, json.loads((SCHEMAS / f"{item['kind']}.json").read_text()))
        else:
            for version in VERSIONS:
                kubernetes_validate.validate(item, version, strict=True)


def test_the_schemas_refuse_what_is_wrong() -> None:
    gateway = next(item for item in of_kind(built("cpu"), "Deployment"))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**gateway, "spec": {**gateway["spec"], "replica": 1}}, VERSIONS[-1], strict=True)
    (monitor,) = of_kind(built("monitoring"), "ServiceMonitor")
    with pytest.raises(jsonschema.ValidationError):
        schema = json.loads((SCHEMAS / "ServiceMonitor.json").read_text())
        jsonschema.validate({**monitor, "spec": {**monitor["spec"], "endpoint": []}}, schema)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_all_objects_are_of_one_namespace_and_carry_labels(overlay: str) -> None:
    for item in built(overlay):
        if item["kind"] not in OF_CLUSTER:
            assert item["metadata"]["namespace"] == "millstream"
    for pod in pods(overlay).values():
        assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == "millstream"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_restricted(overlay: str) -> None:
    """Source: Kubernetes, Pod Security Standards, "Restricted"."""
    (namespace,) = of_kind(built(overlay), "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, pod in pods(overlay).items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        kinds = {kind for volume in spec["volumes"] for kind in volume.keys() - {"name"}}
        assert kinds <= {"emptyDir", "secret", "persistentVolumeClaim"}
        rights = containers(overlay)[name]["securityContext"]
        assert rights == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_are_those_of_this_release(overlay: str) -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for one in containers(overlay).values():
        name, _, tag = one["image"].partition(":")
        assert (name in IMAGES and tag == VERSION) or one["image"] == compose["redis"]["image"]
    if redis := containers(overlay).get("millstream-redis"):
        assert redis["args"] == compose["redis"]["command"]
        assert pods(overlay)["millstream-redis"]["spec"]["securityContext"]["runAsUser"] == 999


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_settings_of_pods_are_settings(overlay: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("redis://of-a-secret-with-32-characters")
    for one in of_product(overlay).values():
        with monkeypatch.context() as patch:
            of_image = stage(IMAGES[one["image"].partition(":")[0]]).environment
            for name, value in (of_image | variables(built(overlay), one)).items():
                if name in SECRET_FILES:
                    assert any(value.startswith(mount["mountPath"]) for mount in one["volumeMounts"]), name
                    patch.setenv(name, str(tmp_path / "secret"))
                elif name.startswith("MILLSTREAM_"):
                    assert name.removeprefix("MILLSTREAM_").lower() in settings_class().model_fields, name
                    patch.setenv(name, value)
            settings = Settings()
        assert settings.redis_url is not None
        assert str(settings.home) in {mount["mountPath"] for mount in one["volumeMounts"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_secrets_are_named_and_never_contained(overlay: str) -> None:
    assert not of_kind(built(overlay), "Secret")
    readme = (FOLDER / "README.md").read_text()
    for pod in pods(overlay).values():
        for volume in pod["spec"]["volumes"]:
            if secret := volume.get("secret"):
                kind = "generic" if "items" in secret else "tls"
                assert f"create secret {kind} {secret['secretName']}" in readme
                assert all(f"--from-literal={item['key']}=" in readme for item in secret.get("items", []))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_all_gateways_and_no_other_pods_get_the_secrets_of_callers(overlay: str) -> None:
    """A gateway verifies AWS signatures of keys that another one made only if both have the same access secret."""
    of_callers = {"MILLSTREAM_ADMIN_KEY_FILE": "admin_key", "MILLSTREAM_ACCESS_SECRET_FILE": "access_secret"}
    gateways = 0
    for name, one in of_product(overlay).items():
        given = variables(built(overlay), one)
        volumes = {volume["name"]: volume for volume in pods(overlay)[name]["spec"]["volumes"]}
        mounted = {item["key"] for volume in volumes.values() for item in volume.get("secret", {}).get("items", [])}
        assert not {variable.removesuffix("_FILE") for variable in of_callers} & given.keys(), "a value in a manifest"
        if one["name"] != "gateway":
            assert not of_callers.keys() & given.keys()
            assert not set(of_callers.values()) & mounted
            continue
        gateways += 1
        folders = {mount["mountPath"]: volumes[mount["name"]] for mount in one["volumeMounts"]}
        for variable, key in of_callers.items():
            folder, _, file = given[variable].rpartition("/")
            (item,) = folders[folder]["secret"]["items"]
            assert item == {"key": key, "path": file}
            assert folders[folder]["secret"].get("optional", False) is False, "a gateway would make a secret of its own"
    assert gateways == 1


def test_monitors_give_the_jobs_that_compose_gives_and_alerts_ask_for() -> None:
    """Prometheus Operator's own values are names of Services and monitors, which no alert knows."""
    scraped = {one["job_name"] for one in yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]}
    asked = {job for rule in rules() for job in re.findall(r'\bjob=~?"([^"]*)"', rule["expr"])}
    (service,) = of_kind(built("monitoring"), "ServiceMonitor")
    ((gateway, installation),) = (endpoint["relabelings"] for endpoint in service["spec"]["endpoints"])
    assert gateway == {"targetLabel": "job", "replacement": "millstream-gateway"}
    (pod,) = of_kind(built("monitoring"), "PodMonitor")
    ((others, same),) = (endpoint["relabelings"] for endpoint in pod["spec"]["podMetricsEndpoints"])
    assert installation == same == {"sourceLabels": ["__meta_kubernetes_namespace"], "targetLabel": "installation"}
    (components,) = (one["values"] for one in pod["spec"]["selector"]["matchExpressions"])
    assert others["sourceLabels"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_component"]
    given = {gateway["replacement"], *(others["replacement"].replace("$1", one) for one in components)}
    assert given == scraped - {"prometheus"}
    assert asked <= given


def test_prometheus_reads_the_key_that_gateways_have_for_metrics() -> None:
    (service,) = of_kind(built("monitoring"), "ServiceMonitor")
    key = service["spec"]["endpoints"][0]["authorization"]["credentials"]
    (gateway,) = (one for one in of_product("monitoring").values() if one["name"] == "gateway")
    folder, _, file = variables(built("monitoring"), gateway)["MILLSTREAM_METRICS_KEY_FILE"].rpartition("/")
    (mount,) = (one["name"] for one in gateway["volumeMounts"] if one["mountPath"] == folder)
    volumes = {one["name"]: one for one in pods("monitoring")["millstream-gateway"]["spec"]["volumes"]}
    assert volumes[mount]["secret"] == {"secretName": key["name"], "items": [{"key": key["key"], "path": file}]}


def test_models_of_a_bucket_are_read_by_gateways_and_workers_and_written_by_none() -> None:
    """Source: mountpoint-s3-csi-driver, docs/CONFIGURATION.md, "Static Provisioning"."""
    (volume,) = of_kind(built("s3"), "PersistentVolume")
    claims = {claim["metadata"]["name"]: claim for claim in of_kind(built("s3"), "PersistentVolumeClaim")}
    assert claims.keys() == {"millstream-home", "millstream-models"}
    claim = claims["millstream-models"]
    assert volume["spec"]["claimRef"] == {name: claim["metadata"][name] for name in ("namespace", "name")}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    for spec in (volume["spec"], claim["spec"]):
        assert spec["storageClassName"] == "", "static provisioning: the cluster's default class would make a volume"
        assert spec["accessModes"] == ["ReadOnlyMany"]
    assert volume["spec"]["csi"]["driver"] == "s3.csi.aws.com"
    security = pods("s3")["millstream-gateway"]["spec"]["securityContext"]
    owner = {f"uid={security['runAsUser']}", f"gid={security['runAsGroup']}", "allow-other", "read-only"}
    assert owner <= set(volume["spec"]["mountOptions"])
    for name, one in of_product("s3").items():
        spec = pods("s3")[name]["spec"]
        mounts = [mount for mount in one["volumeMounts"] if mount["name"] == "models"]
        if one["name"] == "controller":
            assert not mounts
            continue
        assert mounts == [{"name": "models", "mountPath": "/models", "readOnly": True}]
        (models,) = [volume["persistentVolumeClaim"] for volume in spec["volumes"] if volume["name"] == "models"]
        assert models == {"claimName": "millstream-models", "readOnly": True}
        if one["name"] == "gateway":
            assert variables(built("s3"), one)["MILLSTREAM_TRITON_REPOSITORIES"] == mounts[0]["mountPath"]


def test_tls_reaches_the_gateways_and_their_probes() -> None:
    for name, pod in pods("tls").items():
        (one,) = pod["spec"]["containers"]
        given = variables(built("tls"), one)
        if name != "millstream-gateway":
            assert not [variable for variable in given if variable.startswith("MILLSTREAM_TLS")]
            continue
        folder = next(mount["mountPath"] for mount in one["volumeMounts"] if mount["name"] == "tls")
        assert given["MILLSTREAM_TLS_CERT_FILE"] == f"{folder}/tls.crt"
        assert given["MILLSTREAM_TLS_KEY_FILE"] == f"{folder}/tls.key"
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert one[kind]["httpGet"]["scheme"] == "HTTPS"
    services = {item["metadata"]["name"]: item for item in of_kind(built("tls"), "Service")}
    ports = services["millstream"]["spec"]["ports"]
    assert [(port["name"], port["appProtocol"]) for port in ports] == [("http", "https"), ("grpc", "https")]


def test_tls_lets_prometheus_scrape_over_https(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: millstream\n"
        "resources: [kubernetes/base]\ncomponents: [kubernetes/components/monitoring, kubernetes/components/tls]\n"
    )
    shutil.copytree(kubernetes.FOLDER, tmp_path / "kubernetes")
    (monitor,) = of_kind(kubernetes.build_folder(tmp_path), "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": "millstream-tls", "key": "ca.crt"}


def test_the_readmes_patch_of_the_bucket_builds(tmp_path: Path) -> None:
    """The kustomization that deploy/kubernetes/README.md tells to write for a bucket."""
    text = next(text for text in yaml_blocks() if "overlays/s3" in text)
    (volume,) = of_kind(built_from(text, tmp_path), "PersistentVolume")
    assert volume["spec"]["csi"]["volumeAttributes"] == {"bucketName": "my-bucket"}
    assert [option for option in volume["spec"]["mountOptions"] if " " in option] == [
        "region eu-central-1",
        "prefix production/models/",
    ]


def ports_that_are_served(one: dict[str, Any], overlay: str) -> dict[str, int]:
    """The ports at which the settings let a process listen, by the names that containers give them."""
    of_image = stage(IMAGES[one["image"].partition(":")[0]]).environment
    given = of_image | variables(built(overlay), one)
    fields = {name.removeprefix("MILLSTREAM_").lower(): value for name, value in given.items()}
    settings = settings_class().model_validate(
        {name: value for name, value in fields.items() if name in settings_class().model_fields}
    )
    if one["name"] == "gateway":
        return {"http": settings.http_port, "grpc": settings.grpc_port, "replies": settings.reply_port}
    return {"metrics": settings.metrics_port}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_and_paths_are_served(overlay: str) -> None:
    served = {"/metrics", "/live", "/ready", *json.loads((ROOT / "docs/openapi.json").read_text())["paths"]}
    for one in of_product(overlay).values():
        ports = {item["name"]: item["containerPort"] for item in one["ports"]}
        assert ports == ports_that_are_served(one, overlay)
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert one[kind]["httpGet"]["port"] in ports
            assert one[kind]["httpGet"]["path"] in served
    for item in of_kind(built(overlay), "ServiceMonitor", "PodMonitor"):
        for endpoint in item["spec"].get("endpoints", []) + item["spec"].get("podMetricsEndpoints", []):
            assert endpoint["path"] in served


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_selector_finds_pods_and_their_ports(overlay: str) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(overlay).items()}

    def found(selector: dict[str, Any]) -> list[dict[str, Any]]:
        names = [name for name, own in labels.items() if selects(selector, own)]
        assert names, selector
        return [containers(overlay)[name] for name in names]

    for item in of_kind(built(overlay), "Service"):
        for one in found({"matchLabels": item["spec"]["selector"]}):
            assert {port["targetPort"] for port in item["spec"]["ports"]} <= {port["name"] for port in one["ports"]}
    for item in of_kind(built(overlay), "PodDisruptionBudget"):
        assert len(found(item["spec"]["selector"])) == 1
    for item in of_kind(built(overlay), "NetworkPolicy"):
        chosen = found(item["spec"]["podSelector"])
        open_ports = {port["port"] for rule in item["spec"].get("ingress", []) for port in rule["ports"]}
        assert open_ports <= {port["containerPort"] for one in chosen for port in one["ports"]}
        for rule in item["spec"].get("ingress", []):
            for peer in rule.get("from", []):
                assert "namespaceSelector" in peer or found(peer["podSelector"])
    for item in of_kind(built(overlay), "PodMonitor"):
        for one in found(item["spec"]["selector"]):
            assert item["spec"]["podMetricsEndpoints"][0]["port"] in {port["name"] for port in one["ports"]}
    for item in of_kind(built(overlay), "ServiceMonitor"):
        services = of_kind(built(overlay), "Service")
        services = [one for one in services if selects(item["spec"]["selector"], one["metadata"]["labels"])]
        assert [one["metadata"]["name"] for one in services] == ["millstream"]
        assert item["spec"]["endpoints"][0]["port"] in {port["name"] for port in services[0]["spec"]["ports"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_was_accepted_is_answered_before_a_pod_is_killed(overlay: str) -> None:
    for name, one in of_product(overlay).items():
        settings = variables(built(overlay), one)
        before = float(settings.get("MILLSTREAM_DRAIN_DELAY_S", 0))
        drain_s = float(settings.get("MILLSTREAM_DRAIN_S", 0))
        assert (drain_s > 0) == (one["name"] != "controller")
        assert pods(overlay)[name]["spec"]["terminationGracePeriodSeconds"] >= before + drain_s + END_S
        assert (before > 0) == (one["name"] == "gateway"), "only a gateway has connections to wait for"
        assert "lifecycle" not in one


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_part_survives_the_loss_of_a_node(overlay: str) -> None:
    budgets = of_kind(built(overlay), "PodDisruptionBudget")
    for item in of_kind(built(overlay), "Deployment"):
        template = item["spec"]["template"]
        own = [one for one in budgets if selects(one["spec"]["selector"], template["metadata"]["labels"])]
        assert len(own) == (item["metadata"]["name"] != "millstream-redis")
        for spread in template["spec"].get("topologySpreadConstraints", []):
            assert selects(spread["labelSelector"], template["metadata"]["labels"])
        assert ("topologySpreadConstraints" in template["spec"]) == bool(own)


def test_the_readmes_own_folder_builds(tmp_path: Path) -> None:
    """The kustomization that deploy/kubernetes/README.md tells to write."""
    objects = built_from(yaml_blocks()[0], tmp_path)
    (claim,) = of_kind(objects, "PersistentVolumeClaim")
    assert claim["spec"]["storageClassName"] == "a-class-with-ReadWriteMany"
    images = {
        one["image"]
        for item in of_kind(objects, "Deployment")
        for one in item["spec"]["template"]["spec"]["containers"]
        if item["metadata"]["name"] != "millstream-redis"
    }
    assert images == {f"registry.example/millstream-{name}:{VERSION}" for name in ("gateway", "worker-cpu")}
    pushed = re.findall(r"registry\.example/millstream-\$target:([\d.]+)", (FOLDER / "README.md").read_text())
    assert set(pushed) == {VERSION}


def yaml_blocks() -> list[str]:
    """Return the blocks of YAML in the page."""
    found = re.findall(r"```yaml\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    return [textwrap.dedent(block) for block in found]


def built_from(text: str, folder: Path) -> list[dict[str, Any]]:
    """Return the objects of a kustomization of the page, which is written into a folder of its own."""
    assert "../millstream/deploy/kubernetes" in text
    text = text.replace("../millstream/deploy/kubernetes", os.path.relpath(FOLDER, folder))
    (folder / "kustomization.yaml").write_text(text)
    return kubernetes.build_folder(folder)


def test_the_readme_names_every_folder() -> None:
    readme = (FOLDER / "README.md").read_text()
    for kind in ("components", "overlays"):
        (row,) = re.findall(rf"^\| `{kind}/` \|(.*)\|$", readme, re.MULTILINE)
        assert sorted(re.findall(r"`([\w-]+)`", row)) == sorted(one.name for one in (FOLDER / kind).iterdir())
