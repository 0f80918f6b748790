"""Compose files, Dockerfiles, image names and models; unsupported values are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from inspect_ai.util import ComposeConfig, JSONSchema, SandboxEnvironmentSpec
from tests.inspect_docker_pool.composed import refusal
from tests.packages import run

from inspect_docker_pool.compose import parse_config, sample_variables, used_variables
from inspect_docker_pool.config import (
    KEEP_ALIVE,
    MIB,
    DockerPoolConfig,
    host_options,
    is_keep_alive,
    parse_size,
)
from inspect_docker_pool.errors import SandboxConfigError


@pytest.fixture
def compose(compose_plugin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def write(service: dict[str, Any] | None = None, **top: Any) -> str:
        data = {"services": {"default": {"image": "i", **(service or {})}}, **top}
        path = tmp_path / "compose.yaml"
        path.write_text(yaml.safe_dump(data))
        return str(path)

    return write


def test_every_honoured_key_reaches_the_container(compose: Any, tmp_path: Path) -> None:
    (tmp_path / "vars.env").write_text("# a comment\nA=1\nB='two words'\n")
    path = compose(
        {
            "build": {"context": ".", "dockerfile": "D", "args": ["X=1"]},
            "command": "sleep infinity", "cap_drop": [],
            "environment": {"B": 2, "NOBODY_SET_THIS": None},
            "env_file": "vars.env",
            "working_dir": "/v/../w",
            "user": "1000",
            "hostname": "h",
            "init": True,
            "network_mode": "bridge",
            "cpus": "0.5",
            "mem_limit": "512m",
            "pids_limit": 9,
            "shm_size": "1g",
            "ulimits": {"nofile": {"soft": 1, "hard": 2}, "core": 0},
            "cap_add": ["CAP_CHOWN"],
            "security_opt": ["no-new-privileges=false"],
            "read_only": True,
            "tmpfs": ["/tmp:size=1m"],
            "volumes": ["./data:/data:ro", {"type": "volume", "source": "kept", "target": "/v",
                                            "read_only": True}],
            "healthcheck": {"test": "true", "interval": "1m5s", "timeout": "1s"},
            "ports": ["80"],
            "expose": [81],
            "extra_hosts": ["here:host-gateway"],
            "stop_signal": "SIGINT",
            "restart": "always",
            "labels": ["a=b"],
            "logging": {"driver": "json-file"},
            "deploy": {"replicas": 1, "resources": {"reservations": {"memory": "1g"}}},
            "x-docker-pool": {"warm": 5, "max": 7, "disk": 0},
        },
        volumes={"kept": None},
        name="project",
    )  # fmt: skip
    project = parse_config(path)
    config = project.default
    assert config.build is not None
    assert (config.build.context, config.build.dockerfile) == (str(tmp_path), "D")
    assert config.build.args == (("X", "1"),)
    assert config.command == ("sleep", "infinity")
    assert dict(config.environment) == {"A": "1", "B": "2", "NOBODY_SET_THIS": None}
    assert (config.working_dir, config.user, config.hostname) == ("/w", "1000", "h")
    assert config.limits.cpus == 0.5
    assert config.limits.memory == 512 * MIB
    assert (config.limits.pids, config.limits.disk, config.limits.shm) == (9, None, 2**30)
    assert config.limits.ulimits == (("core", 0, 0), ("nofile", 1, 2))
    assert config.hardening.cap_add == ("CHOWN",)
    assert config.hardening.cap_drop == ()
    assert not config.hardening.no_new_privileges
    assert config.hardening.read_only
    assert config.hardening.network == "bridge"
    assert [(m.kind, m.source, m.target) for m in config.mounts] == [
        ("bind", str(tmp_path / "data"), "/data"),
        ("volume", "kept", "/v"),
    ]
    assert config.healthcheck is not None
    assert (config.healthcheck.test, config.healthcheck.seconds) == (("CMD-SHELL", "true"), 198)
    assert config.ports == ("80/tcp",)
    assert config.extra_hosts == ("here:host-gateway",)
    assert (project.pool.warm, project.pool.max) == (5, 7)


@pytest.mark.parametrize(
    ("service", "named"),
    [
        ({"depends_on": ["db"]}, "depends on"),
        ({"ports": ["80:80"]}, "ports"),
        ({"extends": {"service": "other"}}, "other"),
        ({"devices": ["/dev/kvm"]}, "devices"),
        ({"runtime": "nvidia"}, "runtime"),
        ({"privileged": True}, "privileged"),
        ({"network_mode": "host"}, "network_mode host"),
        ({"network_mode": "container:x"}, "network_mode container:x"),
        ({"security_opt": ["apparmor=x"]}, "security_opt apparmor"),
        ({"volumes": ["/data:/data"]}, "volumes"),
        ({"volumes": ["/data"]}, "volumes"),
        ({"volumes": ["/var/run/docker.sock:/s:ro"]}, "docker.sock"),
        ({"volumes": ["/var/run:/s:ro"]}, "volumes"),
        ({"cpus": "many"}, "cpus"),
        ({"build": {"context": ".", "network": "host"}}, "build.network"),
        ({"deploy": {"replicas": 2}}, "deploy.replicas"),
        ({"deploy": {"resources": {"reservations": {"devices": [{"capabilities": ["gpu"]}]}}}},
         "deploy.devices"),
        ({"memswap_limit": "9g"}, "memswap_limit"),
        ({"pull_policy": "daily"}, "pull_policy"),
        ({"tty": True, "command": "serve"}, "tty"),
        ({"networks": ["n"]}, "undefined network n"),
        ({"networks": {"default": {"ipv4_address": "1.2.3.4"}}}, "networks.default.ipv4_address"),
        ({"colour": "red"}, "colour"),
        ({"cap_add": ["FLYING"]}, "FLYING"),
        ({"x-docker-pool": [1]}, "x-docker-pool"),
        ({"x-docker-pool": {"warmth": 1}}, "warmth"),
        ({"mem_limit": "much"}, "mem_limit"),
        ({"env_file": "none.env"}, "none.env"),
        ({"image": None}, "image"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(
    compose: Any, service: dict[str, Any], named: str
) -> None:
    with pytest.raises(SandboxConfigError) as caught:
        parse_config(compose(service))
    assert named in str(caught.value)
    assert "compose.yaml" in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- services", "a mapping"),
        ("services: []", "services"),
        ("services: {default: }", "default"),
        ("include: [{path: }]", "empty"),
        ("services: {default: {image: x, networks: [n]}}\n"
         "networks: {n: {external: true, name: host}}", "networks host"),
        ("services: {default: {image: x, networks: [n]}}\n"
         "networks: {n: {external: true, name: 'container:x'}}", "networks container:x"),
        ("services: {default: {image: x}}\nsecrets: {x: {file: compose.yaml}}", "secrets"),
        ("services: {default: {image: x}}\nconfigs: {x: {file: compose.yaml}}", "configs"),
    ],
)  # fmt: skip
def test_files_of_any_shape_are_refused_with_a_reason(
    compose_plugin: None, tmp_path: Path, text: str, named: str
) -> None:
    (tmp_path / "compose.yaml").write_text(text)
    with pytest.raises(SandboxConfigError, match=named):
        parse_config(str(tmp_path / "compose.yaml"))


@pytest.mark.parametrize("zero", [0, "0"])
def test_a_zero_is_no_limit_as_for_compose(compose: Any, zero: Any) -> None:
    limits = parse_config(
        compose({"cpus": zero, "mem_limit": zero, "pids_limit": 0})
    ).default.limits
    assert (limits.cpus, limits.memory, limits.pids) == (None, None, None)


@pytest.mark.usefixtures("compose_plugin")
def test_a_file_is_read_as_compose_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSED", "on")
    (tmp_path / ".env").write_text("FROM_FILE=there\n")
    (tmp_path / "vars.env").write_text('export QUOTED="a b" # a remark\n')
    path = tmp_path / "compose.yaml"
    path.write_text("""
services:
  default:
    image: i
    env_file: vars.env
    environment: [PASSED, NOT_SET, TIME=12:30:45, ANSWER=yes, "NEST=${NONE:-${FROM_FILE}}"]
    build: {context: ., args: [PASSED, NOT_SET]}
    read_only: 'false'
    network_mode: bridge
""")
    assert refusal(path) is None
    assert dict(parse_config(str(path)).default.environment)["PASSED"] == "on"
    monkeypatch.setenv("PASSED", "off")
    assert dict(parse_config(str(path)).default.environment)["PASSED"] == "off"


def test_without_compose_a_file_is_refused_and_all_else_works(
    compose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxConfigError, match="compose"):
        parse_config(compose({"hostname": "without"}))
    assert parse_config(DockerPoolConfig(image="i", network="bridge")).default.image == "i"


@pytest.mark.parametrize("service", [{}, {"network_mode": "none"}, {"networks": ["default"]}])
def test_a_network_that_hardening_takes_away_is_told_once(
    compose: Any, service: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = compose(service)
    config = parse_config(path).default
    parse_config(path)
    assert caplog.text.count("names no network") == (0 if service else 1)
    assert config.hardening.network == ("" if "networks" in service else "none")


def test_a_snapshot_of_several_services_is_refused(compose: Any) -> None:
    services = {"default": {"image": "i"}, "server": {"image": "j"}}
    path = compose(services=services, **{"x-docker-pool": {"snapshot": "always"}})
    with pytest.raises(SandboxConfigError, match="snapshot: always"):
        parse_config(path)


@pytest.mark.usefixtures("compose_plugin")
def test_the_only_service_keeps_its_name(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text("services: {agent: {image: a, x-default: true}}")
    assert parse_config(str(path)).default.service == "agent"


def test_variables_come_from_metadata_and_environment(
    compose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_ENV", "env")
    path = compose(
        {"image": "${SAMPLE_METADATA_IMAGE}", "environment":
         {"A": "$FROM_ENV", "B": "${NONE:-b}", "C": "$$C", "D": "${FROM_ENV:+d}"}}
    )  # fmt: skip
    variables = sample_variables({"image": "special:1", "other": "x"})
    config = parse_config(path, variables).default
    assert config.image == "special:1"
    assert dict(config.environment) == {"A": "env", "B": "b", "C": "$C", "D": "d"}
    renamed = Path(path).rename(Path(path).with_name("other.yaml"))
    for named in (str(renamed), DockerPoolConfig(file=str(renamed))):
        assert used_variables(named, variables) == {"SAMPLE_METADATA_IMAGE": "special:1"}
    with pytest.raises(SandboxConfigError, match="NEEDED"):
        parse_config(compose({"image": "${NEEDED:?tell}"}))


def test_a_dockerfile_is_built_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("FROM x")
    config = parse_config(str(path)).default
    assert config.build is not None
    assert config.build.context == str(tmp_path)
    assert config.command == KEEP_ALIVE


def test_an_image_can_be_named_even_after_inspect_made_it_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_config("registry/name:1").default.image == "registry/name:1"
    assert parse_config(str(tmp_path / "registry/name:1")).default.image == "registry/name:1"
    with pytest.raises(SandboxConfigError, match="does not exist"):
        parse_config("/elsewhere/name:1")
    with pytest.raises(SandboxConfigError, match="does not exist"):
        parse_config("missing-compose.yaml")


def test_no_configuration_is_inspects_default_or_the_folders_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_config(None).default.image == "aisiuk/inspect-tool-support"
    (tmp_path / "Dockerfile").write_text("FROM x")
    assert parse_config(None).default.build is not None


def test_a_model_overrides_its_file_and_survives_a_log(compose: Any) -> None:
    path = compose({"mem_limit": "1g", "x-docker-pool": {"warm": 1, "max": 3}})
    model = DockerPoolConfig(file=path, memory="2g", warm=4, no_new_privileges=False)
    config = parse_config(model)
    assert config.default.limits.memory == 2 * 1024 * MIB
    assert (config.pool.warm, config.pool.max) == (4, 3)
    assert not config.default.hardening.no_new_privileges
    spec = SandboxEnvironmentSpec("docker_pool", model)
    assert SandboxEnvironmentSpec.model_validate(spec.model_dump()).config == model


@pytest.mark.usefixtures("compose_plugin")
def test_a_compose_object_is_understood() -> None:
    services = {"default": {"image": "i", "x-docker-pool": {"warm": 9}}}
    config = parse_config(ComposeConfig.model_validate({"services": services}))
    assert (config.default.image, config.pool.warm) == ("i", 9)


@pytest.mark.parametrize(
    "volume",
    ["/tmp:/data", "data:/data", "/var/run/docker.sock:/x:ro", "/:/host:ro", "/tmp:/data:rw"],
)
def test_mounts_of_a_model_through_which_a_policy_gets_out_are_refused(volume: str) -> None:
    with pytest.raises(SandboxConfigError, match="volumes"):
        parse_config(DockerPoolConfig(image="i", volumes=[volume]))


def test_a_foreign_model_is_refused() -> None:
    with pytest.raises(SandboxConfigError, match="JSONSchema"):
        parse_config(JSONSchema())


def test_pools_are_divided_by_what_containers_are_and_how_many() -> None:
    first = parse_config(DockerPoolConfig(image="i", warm=1))
    same = parse_config(DockerPoolConfig(image="i", warm=1, snapshot=False))
    assert first.key(["id"]) == same.key(["id"])
    for other in (DockerPoolConfig(image="i", warm=2), DockerPoolConfig(image="i", pids=5)):
        assert first.key(["id"]) != parse_config(other).key(["id"])
    assert first.key(["id"]) != first.key(["other"])


def test_the_default_is_hardened() -> None:
    options = host_options(parse_config(DockerPoolConfig(image="i")).default, storage_quota=True)
    assert options["network_mode"] == "none"
    assert options["cap_drop"] == ["ALL"]
    assert options["security_opt"] == ["no-new-privileges:true"]
    assert options["pids_limit"] == 512
    assert options["memswap_limit"] == options["mem_limit"] == 2 * 2**30
    assert options["nano_cpus"] == 10**9
    assert options["storage_opt"] == {"size": str(4 * 2**30)}
    assert options["oom_score_adj"] > 0
    assert "port_bindings" not in options


@pytest.mark.parametrize(
    ("text", "size"),
    [("1k", 1024), ("2MB", 2 * MIB), ("1.5GiB", 3 * 2**29), (7, 7), ("12", 12)],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text) == size
    with pytest.raises(SandboxConfigError):
        parse_size("-1")


@pytest.mark.parametrize(
    ("command", "idle"),
    [
        (("tail", "-f", "/dev/null"), True),
        (("sleep", "infinity"), True),
        (("sh", "-c", "exec sleep infinity"), True),
        (("/bin/bash",), True),
        (("python3",), True),
        (("python3", "serve.py"), False),
        (("sh", "-c", "tail -f /dev/null; serve"), False),
        (None, False),
    ],
)
def test_commands_that_only_keep_a_container_up(
    command: tuple[str, ...] | None, idle: bool
) -> None:
    assert is_keep_alive(command) is idle


@pytest.mark.slow
def test_importing_the_provider_does_not_import_the_sdk() -> None:
    program = "import sys, inspect_docker_pool.environment; print('docker' in sys.modules)"
    assert run(sys.executable, "-c", program) == "False\n"


def test_a_configuration_object_can_be_kept_in_a_set() -> None:
    def one() -> DockerPoolConfig:
        return DockerPoolConfig(image="i", environment={"A": "b"}, command=["tail"])

    assert {one(), one()} == {one()}
    assert len({one(), DockerPoolConfig(image="i", environment={"A": "c"})}) == 2
