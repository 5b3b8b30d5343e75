"""The Helm chart, rendered without a cluster: what it makes of its values, and which it rejects."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from genserve.cli.main import COMMANDS
from genserve.version import __version__
from tests.deploy.helm_chart import CHART, Rendered, needs_helm, render
from tests.deploy.kubernetes_schemas import OLDEST_KUBERNETES, problem

pytestmark = needs_helm

NFS = {"nfs": {"server": "10.0.0.1", "path": "/models"}}
EVERYTHING: dict[str, Any] = {
    "image": {"pullSecrets": [{"name": "registry"}], "tag": "edge"},
    "extraArgs": ["--max-queue=64"],
    "env": [{"name": "OMP_NUM_THREADS", "value": "4"}],
    "loadModels": ["smollm2"],
    "auth": {"keyFile": "keys.toml", "apiKey": "", "controlKey": "control"},
    "tls": {"secretName": "certificate"},
    "service": {"type": "LoadBalancer", "sessionAffinity": "ClientIP", "annotations": {"a": "b"}},
    "serviceAccount": {"annotations": {"a": "b"}},
    "gpu": {"count": 2, "runtimeClassName": "nvidia"},
    "autoscaling": {"enabled": True},
    "metrics": {"requireKey": True, "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "networkPolicy": {"egress": [{"ports": [{"port": 443}]}]},
    "podLabels": {"a": "b"},
    "podAnnotations": {"a": "b"},
    "nodeSelector": {"a": "b"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
}
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "open": {"auth": {"allowUnauthenticated": True}, "allowedHosts": ["models.example"]},
    "keda": {"autoscaling": {"enabled": True, "source": "keda"}},
    "monitored": {"metrics": {"requireKey": True, "podMonitor": {"enabled": True}}},
    "bare": {name: {"enabled": False} for name in ("podDisruptionBudget", "networkPolicy")},
    "two models": {"repository": {"pull": {"models": ["smollm2", "other"], "precision": "fp16"}}},
    "image": {"repository": {"source": "image", "image": {"reference": "models:7", "path": "/models/"}}},
    "git": {"repository": {"source": "git", "git": {"url": "https://example.com/models.git"}}},
    "s3": {"repository": {"source": "s3", "s3": {"uri": "s3://b/models", "endpoint": "http://minio:9000"}}},
    "claim": {"repository": {"source": "claim", "claim": {"name": "models", "subPath": "v3"}}},
    "volume": {"repository": {"source": "volume", "volume": NFS}},
    "slow": {"drain": {"preStopSeconds": 20, "exitTimeoutSeconds": 300}, "probes": {"startupSeconds": 1801}},
}
REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown value": ({"replicas": 3}, "additional properties 'replicas' not allowed"),
    "an unknown source": ({"repository": {"source": "ftp"}}, "/repository/source"),
    "a number of the wrong type": ({"gpu": {"count": "two"}}, "/gpu/count"),
    "a bucket without its scheme": ({"repository": {"s3": {"uri": "bucket/models"}}}, "/repository/s3/uri"),
    "no key": ({"auth": {"apiKey": ""}}, "or set auth.allowUnauthenticated"),
    "no claim": ({"repository": {"source": "claim"}}, "repository.claim.name names"),
    "no volume": ({"repository": {"source": "volume"}}, "repository.volume has the volume"),
    "no URL": ({"repository": {"source": "git"}}, "repository.git.url names"),
    "no bucket": ({"repository": {"source": "s3"}}, "repository.s3.uri names"),
    "no image": ({"repository": {"source": "image"}}, "repository.image.reference names"),
}


@pytest.fixture(scope="module")
def helm():
    return render(VALUES | {name: values for name, (values, _) in REJECTED.items()})


@pytest.fixture(scope="module")
def rendered(helm) -> dict[str, Rendered]:
    return helm[0]


def pod(documents: dict[str, Any]) -> dict[str, Any]:
    return documents["Deployment"]["spec"]["template"]["spec"]


def server(documents: dict[str, Any]) -> dict[str, Any]:
    [container] = pod(documents)["containers"]
    return container


@pytest.mark.parametrize("name", VALUES)
def test_kubernetes_accepts_what_is_rendered(rendered, name) -> None:
    assert {kind: problem(document) for kind, document in rendered[name].items()} == dict.fromkeys(
        rendered[name], ""
    )


@pytest.mark.parametrize("name", REJECTED)
def test_wrong_values_are_rejected_by_their_name(rendered, name) -> None:
    assert REJECTED[name][1] in rendered[name]


def test_helm_lint_finds_nothing(helm) -> None:
    findings = helm[2]
    assert findings["errors"] == []
    assert [line for line in findings["messages"] if line["error"] != "icon is recommended"] == []


def test_the_chart_has_the_version_of_genserve() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == __version__


def test_the_chart_is_validated_for_the_oldest_kubernetes_that_it_allows() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["kubeVersion"] == f">={OLDEST_KUBERNETES}-0"


@pytest.mark.parametrize("name", VALUES)
def test_the_commands_accept_the_arguments(rendered, name) -> None:
    for container in [*pod(rendered[name]).get("initContainers", ()), server(rendered[name])]:
        if "genserve/genserve:" in container["image"]:
            command, *arguments = container["args"]
            COMMANDS[command].read(command, arguments)


@pytest.mark.parametrize("name", VALUES)
def test_a_pod_is_killed_only_after_the_server_would_have_ended(rendered, name) -> None:
    container = server(rendered[name])
    [drain_s] = [int(word[20:]) for word in container["args"] if word.startswith("--exit-timeout-secs=")]
    pre_stop_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    # The process ends at most 3 s after its drain, also if it hangs.
    assert pod(rendered[name])["terminationGracePeriodSeconds"] >= pre_stop_s + drain_s + 3


def test_models_have_the_time_of_the_values_to_load(rendered) -> None:
    probe = server(rendered["slow"])["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 1801
    assert rendered["slow"]["Deployment"]["spec"]["progressDeadlineSeconds"] > 1801


@pytest.mark.parametrize("name", VALUES)
def test_containers_write_nowhere_but_into_their_volumes(rendered, name) -> None:
    spec = pod(rendered[name])
    assert spec["securityContext"]["runAsNonRoot"]
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"name": "HOME", "value": "/tmp"} in container["env"]
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
    [models] = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "models"]
    assert models["readOnly"]


@pytest.mark.parametrize("name", ["two models", "image", "git", "s3"])
def test_init_containers_fill_the_folder_that_the_server_reads(rendered, name) -> None:
    spec = pod(rendered[name])
    for container in spec["initContainers"]:
        [target] = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "models"]
        words = [*container.get("command", ()), *container.get("args", ())]
        assert [word for word in words if target in word]
        hidden = tuple(mount["mountPath"] + "/" for mount in container["volumeMounts"])
        assert not [word for word in words if word.endswith("/.") and word.startswith(hidden)]
    assert "emptyDir" in spec["volumes"][0]
    assert "--model-repository=/models" in server(rendered[name])["args"]


def test_each_model_is_pulled(rendered) -> None:
    pulls = [container["args"][:2] for container in pod(rendered["two models"])["initContainers"]]
    assert pulls == [["pull", "smollm2"], ["pull", "other"]]


@pytest.mark.parametrize(
    ("name", "volume"),
    [
        ("claim", {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}),
        ("volume", NFS),
    ],
)
def test_a_volume_with_models_is_mounted_as_it_is(rendered, name, volume) -> None:
    spec = pod(rendered[name])
    assert spec["volumes"][0] == {"name": "models"} | volume
    assert "initContainers" not in spec


def test_without_a_key_clients_use_the_names_of_the_service(rendered) -> None:
    container = server(rendered["open"])
    hosts = [word.partition("=")[2] for word in container["args"] if word.startswith("--allowed-host=")]
    assert hosts == [
        "genserve.models", "genserve.models.svc", "genserve.models.svc.cluster.local", "models.example",
    ]  # fmt: skip
    assert "--allow-unauthenticated" in container["args"]
    assert not [variable for variable in container["env"] if "KEY" in variable["name"]]


def test_keys_come_from_the_secret(rendered) -> None:
    variables = {variable["name"]: variable for variable in server(rendered["defaults"])["env"]}
    key = {"name": "genserve-keys", "key": "api-key"}
    assert variables["GENSERVE_API_KEY"]["valueFrom"] == {"secretKeyRef": key}
    spec = pod(rendered["everything"])
    [keys] = [volume for volume in spec["volumes"] if volume["name"] == "keys"]
    assert keys["secret"]["items"] == [{"key": "keys.toml", "path": "keys.toml"}]
    assert "--api-key-file=/keys/keys.toml" in spec["containers"][0]["args"]
    assert rendered["monitored"]["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["authorization"] == {
        "type": "Bearer", "credentials": key,
    }  # fmt: skip


def test_with_a_certificate_all_that_connects_uses_tls(rendered) -> None:
    container = server(rendered["everything"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    assert rendered["everything"]["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"


def test_pods_with_gpus_run_the_image_with_cuda(rendered) -> None:
    assert server(rendered["everything"])["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert re.fullmatch(r".*/genserve:edge", server(rendered["everything"])["image"])
    assert server(rendered["defaults"])["image"].endswith(f":{__version__}")
    assert "nvidia.com/gpu" not in server(rendered["defaults"])["resources"]["limits"]


def test_the_autoscaler_and_nobody_else_sets_the_replicas(rendered) -> None:
    assert rendered["defaults"]["Deployment"]["spec"]["replicas"] == 1
    for name, kind in (("everything", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")):
        assert "replicas" not in rendered[name]["Deployment"]["spec"]
        assert rendered[name][kind]["spec"]["scaleTargetRef"]["name"] == "genserve"


def test_the_notes_say_how_to_make_the_secret_that_the_pods_need(helm) -> None:
    notes = helm[1]
    assert "kubectl --namespace models create secret generic genserve-keys" in notes["defaults"]
    assert "create secret" not in notes["open"]


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    script = Path(__file__).parents[2] / "scripts" / "render_chart.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
