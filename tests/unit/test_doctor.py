"""`inferd doctor`: the finding of each check on machines with and without a fault."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from inferd.engine.api.machine.gpu import Accelerator, NoAcceleratorError
from inferd.server.commands import doctor
from inferd.server.commands.doctor import Check


def test_every_requirement_of_ours_can_be_read() -> None:
    assert doctor.check_packages().status == "ok"


def test_a_missing_and_an_old_package_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        "no-such-package-here>=1",
        "orjson>=9999",
        "msgspec>=0.1",
        "absent; extra == 'dev'",
        "six; sys_platform == 'x'",
    ]
    monkeypatch.setattr(doctor, "requires", lambda name: wanted)
    check = doctor.check_packages()
    assert check.status == "fail"
    assert "no-such-package-here is missing; orjson is 3." in check.found
    assert not any(name in check.found for name in ("msgspec", "absent", "six"))


@pytest.mark.parametrize(
    ("probe", "status"),
    [
        ("raise SystemExit('no torch')", "fail"),
        ("import os; os.abort()", "fail"),
        ('print(\'{"version": "1", "threads": 2, "gpus": [], "cpu": "X", "mkldnn": true, "bf16": true}\')', "ok"),
        ('print(\'{"version": "1", "threads": 2, "gpus": [], "cpu": "X", "mkldnn": true, "bf16": false}\')', "warn"),
        ('print(\'{"version": "1", "threads": 2, "gpus": [], "cpu": "X", "mkldnn": false, "bf16": true}\')', "warn"),
    ],
)
def test_torch_is_asked_in_a_child(probe: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TORCH_PROBE", probe)
    check = doctor.check_torch()
    assert check.status == status
    assert check.found
    assert bool(check.way_out) == (status != "ok")


def test_the_compiler_is_said_with_where_kernels_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = f"{compiler}; kernels are cached under XDG_CACHE_HOME or ~/.cache"
    assert doctor.check_compiler() == Check("compiler", "ok", found)


def test_a_taken_port_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = doctor.check_port("127.0.0.1", port)
    assert doctor.check_port("127.0.0.1", port).status == "ok"
    assert (check.status, f"127.0.0.1:{port}" in check.found) == ("warn", True)
    assert "--port or --host (INFERD_PORT, INFERD_HOST)" in check.way_out


@pytest.mark.parametrize(
    ("asked", "soft", "hard", "status", "words"),
    [
        (
            8_192,
            1_024,
            524_288,
            "ok",
            "soft limit 1,024, hard limit 524,288: enough for all 8192 connections of --max-connections",
        ),
        (
            8_192,
            1_024,
            resource.RLIM_INFINITY,
            "ok",
            "hard limit none: enough for all 8192 connections of --max-connections",
        ),
        (
            8_192,
            1_024,
            4_096,
            "warn",
            "soft limit 1,024, hard limit 4,096: enough for 4000 of the 8192 connections of --max-connections",
        ),
        (8_192, 64, 64, "fail", "enough for 0 of the 8192 connections of --max-connections"),
        (4, 60, 100, "ok", "enough for all 4 connections of --max-connections"),
    ],
)
def test_the_limit_on_open_files_is_said_with_its_connections(
    asked: int, soft: int, hard: int, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, hard))
    check = doctor.check_open_files(asked)
    assert (check.status, check.found.endswith(words)) == (status, True), check
    assert ("raise the hard limit to 8288 (ulimit -Hn" in check.way_out) == (status != "ok")


def test_refused_settings_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_PORT", "http")
    settings, check = doctor.load_settings()
    assert (settings.port, check.status) == (8000, "fail")
    assert "INFERD_PORT" in check.found
    monkeypatch.setenv("INFERD_PORT", "8123")
    settings, check = doctor.load_settings()
    assert (settings.port, check) == (8123, Check("settings", "ok", "port from env INFERD_PORT"))
    monkeypatch.setenv("INFERD_PROT", "8123")
    assert doctor.load_settings()[1].status == "warn"


def test_the_cache_is_looked_for_where_it_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 0)
    assert doctor.check_cache().status == "ok"
    monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 2**62)
    assert "HF_HOME" in doctor.check_cache().way_out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that lets not even root write")
def test_a_cache_that_cannot_be_written_is_not_called_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "HF_HUB_CACHE", "/proc/huggingface/hub")
    check = doctor.check_cache()
    assert (check.status, check.found) == ("warn", "/proc/huggingface/hub is not writable")
    assert "HF_HOME" in check.way_out


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that lets not even root write")
def test_a_folder_in_which_nothing_can_be_kept_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "yet"))
    assert doctor.check_kept().status == "ok"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")
    check = doctor.check_kept()
    assert (check.status, check.found) == ("warn", "/proc/cache/inferd/tokenizers is not writable")
    assert "XDG_CACHE_HOME" in check.way_out


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_memory().status in ("ok", "warn")
    monkeypatch.setattr(doctor, "MIN_MEMORY_BYTES", 2**62)
    assert doctor.check_memory().status == "warn"


@pytest.mark.sampled(keep=3, among="slow starts")
def test_no_compiler_is_a_warning_unless_the_kernels_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check = doctor.check_compiler()
    assert (check.status, doctor.check_gpu().status) == ("warn", "ok")
    assert check.found.endswith("and none to load: none are built yet")
    assert list(tmp_path.iterdir()) == []
    said = """print('{"name": "kernels-avx2-1", "reason": ""}')"""
    monkeypatch.setattr(doctor, "KERNELS_PROBE", said)
    assert doctor.check_compiler() == Check("compiler", "ok", "none is needed: there is kernels-avx2-1")


def test_products_are_said_if_the_kernels_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"reason": "", "threads": 2, "rates": {"float32": 101.4e9, "8 bits": 1_150e9}}
    monkeypatch.setattr(doctor, "KERNELS_PROBE", f"print({json.dumps(said)!r})")
    found = "10^9 operations a second from registers: 101 in float32, 1,150 in 8 bits (2 threads)"
    assert doctor.check_products() == Check("products", "ok", found)
    said = {"reason": "none are built yet"}
    monkeypatch.setattr(doctor, "KERNELS_PROBE", f"print({json.dumps(said)!r})")
    check = doctor.check_products()
    assert (check.status, check.found) == ("ok", "not measured: none are built yet; the first start builds the kernels")
    monkeypatch.setattr(doctor, "KERNELS_PROBE", "raise SystemExit('no torch')")
    assert doctor.check_products().status == "warn"


def _smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def _detected(monkeypatch: pytest.MonkeyPatch, found: Accelerator | str) -> None:
    def detect() -> Accelerator:
        if isinstance(found, str):
            raise NoAcceleratorError(found)
        return found

    monkeypatch.setattr(doctor.accelerator, "detect", detect)


H100 = Accelerator("H100", (9, 0), 80 * doctor.GIB, 79 * doctor.GIB)


@pytest.mark.parametrize(
    ("script", "found", "expected"),
    [
        ("echo 'H100, 81559 MiB'", H100, ("ok", "79.0 GiB free of 80.0; `inferd serve` will use it", "")),
        ("exit 9", H100, ("ok", "`inferd serve` will use it", "")),
        (
            "echo 'H100, 81559 MiB'",
            "torch is built for the CPU only",
            ("warn", "H100, 81559 MiB; `inferd serve` will use the CPU", "torch is built for the CPU only"),
        ),
        ("exit 9", "no driver", ("warn", "nvidia-smi fails; `inferd serve` will use the CPU", "no driver")),
    ],
)
def test_the_gpu_that_is_served_on_is_said(
    script: str,
    found: Accelerator | str,
    expected: tuple[str, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _smi(tmp_path, monkeypatch, script)
    _detected(monkeypatch, found)
    check = doctor.check_gpu()
    assert (check.status, check.way_out) == (expected[0], expected[2])
    assert expected[1] in check.found


@pytest.mark.sampled(keep=3, among="slow starts")
@pytest.mark.parametrize(
    ("capability", "status", "words"),
    [
        ((8, 6), "ok", r"514 forms .* 8\.6 with 99 KiB .*, 12 of them with fewer stages than elsewhere \(gate_up, "),
        ((9, 0), "ok", r"1,\d+ forms .* 9\.0 with 227 KiB of shared memory a program$"),
        ((10, 3), "warn", r"forms .* 10\.3 with 99 KiB"),
    ],
)
def test_the_forms_that_a_gpu_gets_are_said(capability: tuple[int, int], status: str, words: str) -> None:
    pytest.importorskip("triton")
    check = doctor.check_forms(Accelerator("a GPU", capability, 1, 1))
    assert check.status == status and re.search(words, check.found), check


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "FORMS_PROBE", "raise ImportError('No module named triton: %d')")
    check = doctor.check_forms(Accelerator("a GPU", (8, 6), 1, 1))
    assert check == Check(
        "forms", "warn", "ImportError: No module named triton: 86", "plain PyTorch computes everything: install Triton"
    )


def test_a_driver_that_hangs_is_asked_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _smi(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(doctor, "NVIDIA_SMI_TIMEOUT_S", 0.1)
    monkeypatch.setattr(doctor.accelerator, "detect", lambda: pytest.fail("it was asked"))
    check = doctor.check_gpu()
    assert (check.status, check.found) == ("warn", "nvidia-smi does not answer")


def test_without_torch_there_is_no_gpu_to_serve_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("inferd.engine.api.machine.gpu.metadata.version", _raise_missing)
    assert doctor.check_gpu() == Check("gpu", "ok", "no GPU found; `inferd serve` will use the CPU")


def _raise_missing(name: str) -> str:
    raise PackageNotFoundError(name)


@pytest.mark.parametrize(("statuses", "code"), [(["ok", "warn"], 0), (["ok", "fail"], 1)])
def test_a_failure_is_the_exit_code(
    statuses: list[doctor.Status], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("thing", status, "[found] it", "do this" if status != "ok" else "") for status in statuses]
    monkeypatch.setattr(doctor, "examine", lambda: iter(checks))
    assert doctor.run(as_json=True) == code
    assert [entry["status"] for entry in json.loads(capsys.readouterr().out)] == statuses
    assert doctor.run(as_json=False) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok    thing     [found] it"
    assert lines[1:] == [f"{statuses[1]:<4}  thing     [found] it", "                -> do this"]


@pytest.mark.sampled(keep=3, among="slow starts")
def test_torch_stays_in_the_child() -> None:
    code = "import sys; from inferd.server.commands.doctor import check_torch as c; c(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"
