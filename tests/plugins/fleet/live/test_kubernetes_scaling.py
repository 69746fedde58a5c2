"""What the overlays `hpa` and `keda` ask for is what the product says: bounds, metric, path, field, key and address."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from millstream.plugins.fleet.controller.loops import scale_limits
from millstream.plugins.fleet.gateway.routes_scale import PoolScale
from millstream.services.metrics.catalogue import CATALOGUE
from millstream.services.settings import settings_class
from tests.kit.containers.dockerfile import ROOT
from tests.kit.containers.kubernetes import FOLDER, KUBECTL, build, of_kind, variables

pytestmark = pytest.mark.skipif(not KUBECTL.exists(), reason="there is no kubectl for this system")

WORKER = "millstream-worker-cpu"
#: of the trigger metrics-api, with a bearer token (KEDA's documentation of 2.16)
TRIGGER = {"url", "valueLocation", "targetValue", "activationTargetValue", "authMode"}


@pytest.fixture(scope="module", params=["hpa", "keda"])
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return build(request.param)


@pytest.fixture(scope="module")
def keda() -> list[dict[str, Any]]:
    return build("keda")


def deployment(objects: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(item for item in of_kind(objects, "Deployment") if item["metadata"]["name"] == name)


def metric(name: str) -> Any:
    return next(one for one in CATALOGUE if one.name == name)


def test_the_scaler_and_the_decision_have_the_same_bounds(objects: list[dict[str, Any]]) -> None:
    spec = deployment(objects, WORKER)["spec"]
    assert "replicas" not in spec, "an apply would undo the scaler's work"
    (scaler,) = of_kind(objects, "ScaledObject", "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == WORKER
    (worker,) = spec["template"]["spec"]["containers"]
    pool = worker["args"][worker["args"].index("--pool") + 1]
    (controller,) = deployment(objects, "millstream-controller")["spec"]["template"]["spec"]["containers"]
    limits = scale_limits(settings_class()(pools=variables(objects, controller)["MILLSTREAM_POOLS"]))[pool]
    low = scaler["spec"].get("minReplicas", scaler["spec"].get("minReplicaCount"))
    high = scaler["spec"].get("maxReplicas", scaler["spec"].get("maxReplicaCount"))
    assert (limits.workers_min, limits.workers_max) == (low, high)
    assert "MILLSTREAM_POOLS" not in variables(objects, worker), (
        "a worker would share its memory with workers elsewhere"
    )


def test_the_autoscaler_follows_the_wanted_workers_of_the_pool() -> None:
    (scaler,) = of_kind(build("hpa"), "HorizontalPodAutoscaler")
    (asked,) = [one["external"] for one in scaler["spec"]["metrics"]]
    assert asked["target"] == {"type": "AverageValue", "averageValue": "1"}
    assert set(asked["metric"]["selector"]["matchLabels"]) <= set(metric(asked["metric"]["name"]).labels)


def test_the_rule_of_the_adapter_is_of_this_metric() -> None:
    block = next(
        text
        for text in re.findall(r"```yaml\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
        if "rules:" in text
    )
    (rule,) = yaml.safe_load(block)["rules"]["external"]
    name, labels = rule["seriesQuery"].split("{")
    assert set(re.findall(r"(\w+)!=", labels)) == {"namespace", *metric(name).labels}
    assert rule["metricsQuery"] == "max by (pool) (<<.Series>>{<<.LabelMatchers>>})"


def test_keda_asks_a_gateway_and_reads_what_it_answers(keda: list[dict[str, Any]]) -> None:
    (scaled,) = of_kind(keda, "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["type"] == "metrics-api"
    asked = trigger["metadata"]
    assert asked.keys() == TRIGGER
    assert asked["targetValue"] == "1"
    assert asked["valueLocation"] in PoolScale.model_fields
    url = urlsplit(asked["url"])
    service = next(item for item in of_kind(keda, "Service") if item["metadata"]["name"] == "millstream")
    assert url.hostname == f"millstream.{service['metadata']['namespace']}.svc"
    assert url.port in {port["port"] for port in service["spec"]["ports"]}
    path, _, pool = url.path.rpartition("/")
    assert f"{path}/{{pool}}" in json.loads((ROOT / "docs/openapi.json").read_text())["paths"]
    (worker,) = deployment(keda, WORKER)["spec"]["template"]["spec"]["containers"]
    assert pool == worker["args"][worker["args"].index("--pool") + 1]


def test_keda_has_the_key_of_the_gateways(keda: list[dict[str, Any]]) -> None:
    (scaled,) = of_kind(keda, "ScaledObject")
    (authentication,) = of_kind(keda, "TriggerAuthentication")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["authMode"] == "bearer"
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    (secret,) = authentication["spec"]["secretTargetRef"]
    assert secret["parameter"] == "token"
    volumes = deployment(keda, "millstream-gateway")["spec"]["template"]["spec"]["volumes"]
    (key,) = [volume["secret"] for volume in volumes if volume["name"] == "admin-key"]
    assert (secret["name"], secret["key"]) == (key["secretName"], key["items"][0]["key"])
