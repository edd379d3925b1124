"""Files in clusters/: Ray's own validation, KubeRay's schemas, and what neither knows: GPUs of an instance type, ports and
versions that agree, a token everywhere, no ranks on the head, nothing installed at start.

KubeRay's schemas are the files rayclusters.yaml and rayjobs.yaml (`ray-operator/config/crd/bases` of its repository) in the
directory that RAYTRAIN3D_KUBERAY_CRDS names; without it, that part is left out.
"""

import copy
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raytrain3d.load import load
from raytrain3d.plan.plan import make_plan

ROOT = Path(__file__).parent.parent
LAUNCHER = sorted((ROOT / "clusters").glob("*.yaml"))
KUBERAY = sorted((ROOT / "clusters" / "kuberay").glob("*.yaml"))
CRDS = os.environ.get("RAYTRAIN3D_KUBERAY_CRDS")
GPUS = {"p5.48xlarge": 8, "a3-highgpu-8g": 8, "m7i.2xlarge": 0, "n2-standard-8": 0}
CPUS = {"p5.48xlarge": 192, "a3-highgpu-8g": 208}
EFA_INTERFACES = {"p5.48xlarge": 32}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
RAY_VERSION = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)

by_name = pytest.mark.parametrize("path", LAUNCHER, ids=lambda path: path.stem)
by_manifest = pytest.mark.parametrize("path", KUBERAY, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def test_all_kinds_of_clusters_are_there() -> None:
    assert {path.stem for path in LAUNCHER} == {"aws", "gcp", "on-premises", "laptop"}
    assert {read(path)["kind"] for path in KUBERAY} == {"RayCluster", "RayJob"}


# `ray up`


def validated(config: dict[str, Any]) -> dict[str, Any]:
    """As `ray up` prepares it; raises what it would."""
    from ray.autoscaler._private.util import prepare_config, validate_config
    prepared: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


@by_name
def test_ray_takes_the_file(path: Path) -> None:
    validated(read(path))


@pytest.mark.parametrize(("stem", "damage"), [
    ("aws", {"max_wrokers": 3}), ("gcp", {"available_node_types": {"head": {"resources": {"CPU": "four"}}}}),
    ("on-premises", {"head_start_ray_commands": "ray start"})])
def test_ray_refuses_a_damaged_file(stem: str, damage: dict[str, Any]) -> None:
    with pytest.raises(Exception):  # noqa: B017 - Ray raises whatever its validator does
        validated(read(ROOT / "clusters" / f"{stem}.yaml") | damage)


def node_types(path: Path) -> dict[str, Any]:
    types: dict[str, Any] = read(path).get("available_node_types", {})
    return types


@by_name
def test_resources_are_those_of_the_instances(path: Path) -> None:
    for name, kind in node_types(path).items():
        config = kind["node_config"]
        instance = config.get("InstanceType") or config["machineType"]
        assert kind["resources"].get("GPU", 0) == GPUS[instance], name
        if name == "head":
            assert kind["resources"]["CPU"] == 0
        else:
            assert kind["resources"]["CPU"] == CPUS[instance]
        accelerators = config.get("guestAccelerators")
        assert accelerators is None or [each["acceleratorCount"] for each in accelerators] == [GPUS[instance]]


def test_spot_nodes_are_taken_before_others_and_labelled() -> None:
    for stem in ("aws", "gcp"):
        types = node_types(ROOT / "clusters" / f"{stem}.yaml")
        spot, other = (next(kind for kind in types.values() if kind.get("labels", {}).get("market") == market)
                       for market in ("spot", "on-demand"))
        assert spot["priority"] > other["priority"]
        scheduling = [{"provisioningModel": "SPOT"}] if stem == "gcp" else [{"MarketType": "spot"}]
        bought = spot["node_config"].get("scheduling") or [spot["node_config"]["InstanceMarketOptions"]]
        assert scheduling[0] in bought
        assert scheduling[0] not in other["node_config"].get("scheduling", [])
        assert "InstanceMarketOptions" not in other["node_config"]


def test_efa_has_every_interface_once_and_one_place() -> None:
    for name, kind in node_types(ROOT / "clusters" / "aws.yaml").items():
        config = kind["node_config"]
        if name == "head":
            continue
        cards = [each["NetworkCardIndex"] for each in config["NetworkInterfaces"]]
        assert cards == list(range(EFA_INTERFACES[config["InstanceType"]]))
        devices = [(each["DeviceIndex"], each["InterfaceType"]) for each in config["NetworkInterfaces"]]
        assert devices == [(0, "efa"), *[(1, "efa-only")] * (len(cards) - 1)]
        assert config["Placement"]["GroupName"]
        assert not {"SubnetIds", "SecurityGroupIds"} & config.keys()  # Ray refuses both kinds at once


def start_commands(path: Path) -> Iterator[str]:
    config = read(path)
    yield from config["head_start_ray_commands"] + config["worker_start_ray_commands"]


@by_name
def test_commands_use_tokens_one_port_each_and_install_nothing(path: Path) -> None:
    commands = list(start_commands(path))
    assert all("RAY_AUTH_MODE=token" in command for command in commands)
    head, *workers = commands
    for option in ("--port=6379", "--dashboard-host=127.0.0.1", "--dashboard-port=8265", "--metrics-export-port=8080",
                   "--autoscaling-config=~/ray_bootstrap_config.yaml"):
        assert option in head
    for worker in workers:
        assert "--address=$RAY_HEAD_IP:6379" in worker and "--metrics-export-port=8080" in worker
    config = read(path)
    everything = [config.get(key, []) for key in config if key.endswith("commands")]
    assert not re.search(r"\b(pip|conda|apt|apt-get) ", str(everything))
    assert path.stem == "laptop" or config["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}


def test_machines_of_our_own_are_all_used() -> None:
    config = read(ROOT / "clusters" / "on-premises.yaml")
    assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])
    assert "--num-cpus=0 --num-gpus=0" in config["head_start_ray_commands"][0]


@pytest.mark.parametrize("path", [*LAUNCHER, *KUBERAY], ids=lambda path: path.stem)
def test_versions_are_those_of_the_package(path: Path) -> None:
    assert RAY_VERSION is not None
    text = path.read_text()
    assert set(re.findall(r"/raytrain3d:([\w.]+)", text)) <= {VERSION}
    assert set(re.findall(r"rayVersion: (\S+)", text)) <= {RAY_VERSION[1]}
    assert path.parent.name != "kuberay" or "rayVersion" in text


# Images


def test_the_image_bakes_the_tested_versions() -> None:
    text = (ROOT / "clusters" / "Dockerfile").read_text()
    assert "pip install --no-cache-dir -c constraints.txt" in text
    assert f"raytrain3d:{VERSION}" in text
    for copied in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in copied.split()), copied
    python = re.search(r"^FROM python:(\d+)\.(\d+)", text, re.MULTILINE)
    assert python is not None and (int(python[1]), int(python[2])) >= (3, 11)


# KubeRay


def cluster_spec(path: Path) -> dict[str, Any]:
    manifest = read(path)
    spec: dict[str, Any] = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    return spec


@by_manifest
def test_manifest_scales_by_version_2_with_a_token_and_an_idle_head(path: Path) -> None:
    spec = cluster_spec(path)
    assert spec["enableInTreeAutoscaling"] and spec["autoscalerOptions"]["version"] == "v2"
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    head, = spec["headGroupSpec"]["template"]["spec"]["containers"]
    assert {port["name"]: port["containerPort"] for port in head["ports"]} == {"gcs-server": 6379, "dashboard": 8265,
                                                                               "metrics": 8080}
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == 0 < group["maxReplicas"]
        pod = group["template"]["spec"]
        assert pod["restartPolicy"] == "Never"
        worker, = pod["containers"]
        instance = pod["nodeSelector"]["node.kubernetes.io/instance-type"]
        for amounts in worker["resources"].values():
            assert int(amounts["nvidia.com/gpu"]) == GPUS[instance] and int(amounts["cpu"]) <= CPUS[instance]
        assert {mount["name"] for mount in worker["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_job_fits_its_cluster() -> None:
    manifest = read(ROOT / "clusters" / "kuberay" / "rayjob.yaml")
    arguments = manifest["spec"]["entrypoint"].split()
    assert arguments[:4] == ["/opt/venv/bin/python", "-m", "raytrain3d", "train"]
    config = load(str(ROOT / arguments[4].removeprefix("/opt/raytrain3d/")), arguments[5:])
    group, = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert make_plan(config, device="gpu").mesh.size == 8 * group["maxReplicas"]
    assert int(yaml.safe_load(manifest["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60


def strict(schema: Any) -> Any:
    """A structural schema of Kubernetes as a JSON schema in which unknown fields are errors, as `kubectl apply` has it."""
    match schema:
        case {"x-kubernetes-int-or-string": True}:
            return {"type": ["integer", "string"]}
        case dict():
            made = {key: {name: strict(part) for name, part in value.items()} if key == "properties" else strict(value)
                    for key, value in schema.items() if key not in ("description", "default")}
            if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
                made.setdefault("additionalProperties", False)
            return made
        case list():
            return [strict(part) for part in schema]
    return schema


@pytest.fixture(scope="module")
def validators() -> dict[str, Any]:
    """Kind -> validator of its version v1."""
    if CRDS is None:
        pytest.skip("RAYTRAIN3D_KUBERAY_CRDS names no directory")
    found = {}
    for name in ("rayclusters", "rayjobs"):
        definition = yaml.load(Path(CRDS, f"{name}.yaml").read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        version, = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
        schema = strict(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        found[definition["spec"]["names"]["kind"]] = jsonschema.Draft7Validator(schema)
    return found


def errors(validators: dict[str, Any], manifest: dict[str, Any]) -> list[str]:
    return [f"{'/'.join(map(str, error.path))}: {error.message[:200]}"
            for error in validators[manifest["kind"]].iter_errors(manifest)]


@by_manifest
def test_kuberay_takes_the_manifest(path: Path, validators: dict[str, Any]) -> None:
    manifest = read(path)
    assert manifest["apiVersion"] == "ray.io/v1"
    assert errors(validators, manifest) == []
    group = (manifest["spec"].get("rayClusterSpec") or manifest["spec"])["workerGroupSpecs"][0]
    group["replicas"], group["rayStartParms"] = "x", {}
    assert len(errors(validators, manifest)) == 2
