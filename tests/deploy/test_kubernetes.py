"""The Kubernetes files, rendered by kubectl without a cluster, agree with the server and with Kubernetes' schemas."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from inferd.server.config.settings import SETTINGS, Settings
from inferd.server.observability.metrics import Metrics

KUSTOMIZE = Path(__file__).resolve().parents[2] / "deploy" / "kustomize"
CUSTOM = {"PodMonitor"}
"""Kinds that Kubernetes itself does not know."""
ABORT_GRACE_S = 5


def render(tmp_path: Path, overlay: str, *components: str) -> dict[str, Any]:
    """Kind -> object of an overlay with components."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl: apt-get install kubernetes-client")
    folder = os.path.relpath(KUSTOMIZE, tmp_path.resolve())
    given = {
        "resources": [f"{folder}/overlays/{overlay}"],
        "components": [f"{folder}/components/{name}" for name in components],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(given))
    done = subprocess.run([kubectl, "kustomize", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    objects = list(yaml.safe_load_all(done.stdout))
    assert len({each["kind"] for each in objects}) == len(objects)
    return {each["kind"]: each for each in objects}


@pytest.fixture(params=["cpu", "gpu"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return render(tmp_path, request.param, "monitoring", "autoscaling")


def container(objects: dict[str, Any]) -> dict[str, Any]:
    (found,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_kubernetes_accepts_every_object(objects: dict[str, Any]) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("there is no kubernetes-validate: pip install kubernetes-validate")
    schemas = importlib.import_module("kubernetes_validate")
    for kind in objects.keys() - CUSTOM:
        schemas.validate(objects[kind], schemas.latest_version(), strict=True)
    container(objects)["readinesProbe"] = {}
    with pytest.raises(schemas.ValidationError, match="readinesProbe"):
        schemas.validate(objects["Deployment"], schemas.latest_version(), strict=True)


def test_objects_select_the_pods_of_the_deployment_alone(objects: dict[str, Any]) -> None:
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        objects["Deployment"]["spec"]["selector"]["matchLabels"],
        objects["Service"]["spec"]["selector"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        objects["PodMonitor"]["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors), selectors
    named = {port["name"] for port in container(objects)["ports"]}
    (endpoint,) = objects["PodMonitor"]["spec"]["podMetricsEndpoints"]
    (port,) = objects["Service"]["spec"]["ports"]
    assert {endpoint["port"], port["targetPort"]} == named


def test_a_pod_has_no_rights_it_does_not_need(objects: dict[str, Any]) -> None:
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
    rights = container(objects)["securityContext"]
    assert rights == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
    }  # fmt: skip
    mounts = {mount["mountPath"] for mount in container(objects)["volumeMounts"]}
    assert mounts - {"/dev/shm"} == {"/cache", "/tmp"}


def test_probes_ask_what_they_mean(objects: dict[str, Any]) -> None:
    found = container(objects)
    paths = {name: found[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/live"}


def test_a_drain_has_time_to_end(objects: dict[str, Any]) -> None:
    grace_s = objects["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    before_s = container(objects)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert grace_s >= before_s + Settings().shutdown_timeout_s + ABORT_GRACE_S


def test_names_are_those_of_the_server(objects: dict[str, Any]) -> None:
    (metric,) = objects["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in Metrics("m").names()
    named = {*objects["ConfigMap"]["data"], *(each["name"] for each in container(objects)["env"])}
    assert "INFERD_API_KEY" in named and named <= {about.env for about in SETTINGS.values()}
    assert all("value" not in each for each in container(objects)["env"]), "the key comes from a Secret"


def test_several_pods_share_a_volume_that_allows_it(tmp_path: Path) -> None:
    alone = render(tmp_path, "cpu")
    assert alone["Deployment"]["spec"]["replicas"] == 1
    assert alone["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    many = render(tmp_path, "cpu", "autoscaling")
    assert "replicas" not in many["Deployment"]["spec"], "the autoscaler decides"
    assert many["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_page_names_the_secret_that_the_pod_reads(objects: dict[str, Any]) -> None:
    (key,) = (each["valueFrom"]["secretKeyRef"] for each in container(objects)["env"])
    page = (KUSTOMIZE.parents[1] / "docs/deploy.md").read_text()
    assert re.search(rf"create secret generic {key['name']} --from-literal={key['key']}=", page)
