"""The command line: every setting has its flag, help fits a screen, a user's error is one line, and torch is not
imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from inferd.server.commands.app import app
from inferd.server.config.settings import SETTINGS, Settings

POSITIONAL = ("model", "models")
"""Settings that are no flags, but arguments."""


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-P", "-c", "from inferd.server.cli import main; main()", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def serve_help() -> str:
    return command("serve", "--help").stdout


def test_the_module_can_be_run_too() -> None:
    line = [sys.executable, "-P", "-m", "inferd.server.cli", "version"]
    output = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout
    assert output == f"inferd {installed_version('inferd')}\n"


def test_help_fits_a_screen() -> None:
    lines = command("--help").stdout.rstrip("\n").splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_every_setting_is_a_flag_in_its_panel(serve_help: str) -> None:
    panels = re.split(r"╭─ (.+?) ─+╮", serve_help)
    shown = dict(zip(panels[1::2], panels[2::2], strict=True))
    for about in SETTINGS.values():
        if about.name not in POSITIONAL:
            assert about.flag[:17] in shown[about.panel], about.name


def invoke(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, command: str = "serve"
) -> tuple[dict[str, object], object]:
    """Arguments that a command passes to `Settings.load`; nothing is served."""
    given: list[tuple[dict[str, object], object]] = []

    def load(flags: dict[str, object], config: object) -> None:
        given.append((flags, config))
        raise typer.Exit(7)

    monkeypatch.setattr(Settings, "load", load)
    assert CliRunner().invoke(app, [command, *arguments]).exit_code == 7
    return given[0]


def test_flags_reach_the_settings_they_are_named_for(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        name: about.choices[-1] if about.choices else "7" for name, about in SETTINGS.items() if name not in POSITIONAL
    }
    line = ["some/model"]
    for name, value in values.items():
        line += [SETTINGS[name].flag] if SETTINGS[name].is_switch else [SETTINGS[name].flag, value]
    expected = {
        name: True if SETTINGS[name].is_switch else [value] if SETTINGS[name].is_list else value
        for name, value in values.items()
    }
    assert invoke(monkeypatch, *line) == ({"model": "some/model", **expected}, None)
    assert invoke(monkeypatch, "a", "--port", "7", "b=c")[0] == {"models": ["a", "b=c"], "port": "7"}
    assert invoke(monkeypatch, "b=c")[0] == {"models": ["b=c"]}, "one model with a name"
    assert invoke(monkeypatch, "./b=c")[0] == {"model": "./b=c"}


def test_flags_not_given_are_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(monkeypatch, "--no-prefix-caching", "--config", "a.yaml") == (
        {"prefix_caching": False},
        Path("a.yaml"),
    )


def test_the_plan_takes_the_settings_of_a_model_and_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given = invoke(monkeypatch, "a", "b=c", "--config", "a.yaml", "--kv-memory", "1GiB", "--batch", "3", command="plan")
    assert given == (
        {"models": ["a", "b=c"], "kv_memory": "1GiB", "allow_unauthenticated": True},
        Path("a.yaml"),
    )


@pytest.mark.parametrize(("flag", "value"), [("--deterministic", True), ("--no-deterministic", False)])
def test_a_switch_that_is_decided_at_start_can_be_set_to_both(
    monkeypatch: pytest.MonkeyPatch, flag: str, value: bool
) -> None:
    assert invoke(monkeypatch, flag) == ({"deterministic": value}, None)


def test_a_user_error_is_one_line_and_its_exit_code() -> None:
    done = command("serve", "--port", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "inferd: port must be a whole number from 0 to 65535, but got 'x' (flag --port)\n"


CLOSED = """
import os, subprocess, sys
for descriptor in (0, 1, 2):
    os.close(descriptor)
from inferd.server import cli
from inferd.server.commands import app as commands
def app():
    probe = "import os; os.write(int(os.sys.argv[1]), bytes(str([os.fstat(i).st_rdev for i in range(3)]), 'ascii'))"
    subprocess.run([sys.executable, "-P", "-c", probe, sys.argv[1]], pass_fds=[int(sys.argv[1])])
commands.app = app
cli.main()
"""


def test_a_server_without_standard_streams_passes_its_engine_three() -> None:
    """A descriptor of the engine's shared memory must not lie at the place of one."""
    reader, writer = os.pipe()
    with open(reader) as told:
        subprocess.run([sys.executable, "-P", "-c", CLOSED, str(writer)], pass_fds=[writer], check=True, timeout=60)
        os.close(writer)
        assert told.read() == str([os.stat(os.devnull).st_rdev] * 3)


def test_the_version_is_a_flag_and_a_command() -> None:
    runner = CliRunner()
    flag, named = runner.invoke(app, ["--version"]), runner.invoke(app, ["version"])
    assert (flag.exit_code, flag.output) == (0, named.output)
    assert flag.output == f"inferd {installed_version('inferd')}\n"


def test_the_doctor_says_where_its_port_comes_from() -> None:
    assert "INFERD_PORT=8001 inferd doctor" in CliRunner().invoke(app, ["doctor", "--help"]).output


@pytest.mark.sampled(keep=3, among="slow starts")
def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['inferd', '--help']\n"
        "from inferd.server.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'zmq', 'httpx', 'prometheus_client'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "[]\n"
