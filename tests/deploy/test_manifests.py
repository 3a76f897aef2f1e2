"""The files of deploy/gateways: well formed, and in agreement with the server and one another. That
the programs which read them accept them is tested nowhere; the files say so."""

from __future__ import annotations

import ipaddress
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sfumato.cli.arguments import CommandLine
from sfumato.options.table import OPTIONS
from sfumato.server import gateways
from sfumato.server.http.middleware import OPEN_PATHS
from sfumato.server.http.uvicorn_server import AFTER_DRAIN_S

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "gateways"


def documents(name: str) -> dict[str, Any]:
    """The documents of a file by their kind."""
    loaded = yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))
    return {each["kind"]: each for each in loaded}


def served(pod: dict[str, Any]) -> int:
    """Holds a pod's one container against the server; the port that it listens on."""
    (container,) = pod["containers"]
    args = CommandLine().parse_args(container["args"], {})
    assert args.host == "0.0.0.0" and args.public_metrics
    variables = {f"SFUMATO_{option.name.replace('-', '_').upper()}" for option in OPTIONS}
    assert {each["name"] for each in container["env"]} <= variables
    (port,) = container["ports"]
    assert port["containerPort"] == args.port
    paths = {}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        request = container[probe]["httpGet"]
        assert request["port"] in (port["name"], port["containerPort"])
        paths[probe] = request["path"]
    assert set(paths.values()) <= OPEN_PATHS, "they send no key"
    assert (paths["readinessProbe"], paths["livenessProbe"]) == ("/readyz", "/livez")
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= before + args.drain + AFTER_DRAIN_S
    assert {each["name"] for each in container["volumeMounts"]} == {
        each["name"] for each in pod["volumes"]
    }
    return int(args.port)


def test_kubernetes() -> None:
    kinds = documents("kubernetes.yaml")
    spec = kinds["Deployment"]["spec"]
    labels, pod = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
    port = served(pod)
    assert spec["selector"]["matchLabels"] == labels == kinds["Service"]["spec"]["selector"]
    for kind in ("PodDisruptionBudget", "InferencePool"):
        assert kinds[kind]["spec"]["selector"]["matchLabels"] == labels
    assert kinds["InferencePool"]["spec"]["targetPorts"] == [{"number": port}]
    scraped = spec["template"]["metadata"]["annotations"]
    assert scraped["prometheus.io/port"] == str(port)
    assert kinds["Service"]["spec"]["ports"][0]["targetPort"] in (
        each["name"] for each in pod["containers"][0]["ports"]
    )


def test_kserve() -> None:
    served(documents("kserve.yaml")["InferenceService"]["spec"]["predictor"])


def test_llm_d_with_file_discovery() -> None:
    """Addresses and ports are texts, as the router wants them, and all names are defined."""
    endpoints = yaml.safe_load((FOLDER / "llm-d" / "endpoints.yaml").read_text())["endpoints"]
    assert len({each["name"] for each in endpoints}) == len(endpoints) > 1
    for each in endpoints:
        ipaddress.IPv4Address(each["address"])
        assert each["port"].isdecimal()
    router = documents("llm-d/router.yaml")["EndpointPickerConfig"]
    plugins = {each.get("name", each["type"]): each for each in router["plugins"]}
    used = {each["pluginRef"] for each in router["schedulingProfiles"][0]["plugins"]}
    discovery = router["dataLayer"]["discovery"]["pluginRef"]
    assert used | {discovery, "single-profile-handler"} == set(plugins)
    assert plugins[discovery]["parameters"]["path"] == "endpoints.yaml"
    sources = plugins["session-affinity-scorer"]["parameters"]["sessionIdConfig"]["sources"]
    assert {each["header"] for each in sources} <= set(gateways.HEADERS)
    envoy = yaml.safe_load((FOLDER / "llm-d" / "envoy.yaml").read_text())["static_resources"]
    clusters = {each["name"]: each for each in envoy["clusters"]}
    text = yaml.safe_dump(envoy)
    named = set(re.findall(r"cluster(?:_name)?: (\w+)", text))
    assert named == set(clusters) == {"picker", "chosen"}
    assert clusters["chosen"]["original_dst_lb_config"]["http_header_name"] in gateways.HEADERS
    readme = (FOLDER / "llm-d" / "README.md").read_text()
    for port in (*(each["port"] for each in endpoints), "9002", "8080"):
        assert port in readme and (port in text or port not in ("9002", "8080"))


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_well_formed(script: Path) -> None:
    subprocess.run(["sh", "-n", script], check=True, timeout=10)
    command = re.search(r"sfumato serve (.*) &", script.read_text())
    assert command
    CommandLine().parse_args(["serve", *command[1].replace('"$port"', "8081").split()], {})


def test_what_was_not_run_says_so() -> None:
    table = (FOLDER / "README.md").read_text()
    for path in (*FOLDER.rglob("*.yaml"), *FOLDER.rglob("*.sh")):
        rows = [line for line in table.splitlines() if f"]({path.name})" in line]
        was_run = any("was run on" in row for row in rows)
        assert was_run or "not run" in path.read_text().lower() or path.name == "endpoints.yaml"
