"""The wheel holds every module and the embedded model, and no package is importable under a bare name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("server", "engine", "kernels")


PARTS = ("inferd", *FOLDERS)


def copied(source: Path) -> Path:
    """Copy the product's files without build outputs to `source`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (name.split("/")[0] in PARTS or "/" not in name) and os.path.lexists(ROOT / name):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    return source


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    return subprocess.run([*pip, "-w", str(out), str(source)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that the checkout gets no build folders."""
    out = tmp_path_factory.mktemp("wheel")
    done = build(copied(tmp_path_factory.mktemp("source")), out)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("inferd-*.whl")
    return built


def test_a_wheel_without_the_product_is_not_built(tmp_path: Path) -> None:
    """A checkout without links, or an image that copies only the folder `inferd`, gives no wheel."""
    source = copied(tmp_path / "source")
    shutil.rmtree(source / "engine")
    done = build(source, tmp_path / "out")
    assert done.returncode != 0 and "inferd/engine has no __init__.py" in done.stderr


def test_a_type_checker_finds_the_product_in_a_plain_checkout(tmp_path: Path) -> None:
    """An editor's "go to definition" works, with nothing installed and no path set."""
    source = copied(tmp_path / "source")
    program = "from inferd.engine.api.wire.params import SamplingParams\nreveal_type(SamplingParams().temperature)"
    command = [sys.executable, "-m", "mypy", "--no-site-packages", "--config-file=", "--follow-imports=silent"]
    done = subprocess.run([*command, "-c", program], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0 and re.search(r'Revealed type is "(builtins\.)?float"', done.stdout), done.stdout


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-P", "-m", "inferd", "--version"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0 and done.stdout.startswith("inferd "), done


def test_the_wheel_holds_every_file_of_the_product(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        f"inferd/{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for suffix in ("py", "h", "cpp")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
    }
    assert sources <= held, f"not in the wheel: {sorted(sources - held)}"
    assert {"inferd/kernels/cpu/simd.h", "inferd/kernels/ops/linear/cpu.cpp"} <= held
    assert "inferd/__main__.py" in held
    page = {f"inferd/{path.relative_to(ROOT)}" for path in (ROOT / "server/playground/static").iterdir()}
    assert page and page <= held, f"not in the wheel: {sorted(page - held)}"


def test_the_wheel_holds_the_embedded_model_without_its_trainer(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    model = {f"inferd/engine/tiny/model/{path.name}" for path in (ROOT / "engine/tiny/model").iterdir()}
    assert {name for name in held if "tiny" in name} == model
    assert not [name for name in held if not name.startswith(("inferd/", "inferd-"))]


OPTIONAL = ("cudnn", "flash_attn_interface", "flash_attn", "flashinfer")
"""Libraries for attention on GPUs. Only the modules that call them import them."""


@pytest.mark.long
def test_every_module_imports_from_the_wheel_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """The dependencies come from this environment; the package itself only from the wheel."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    fresh = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    zipfile.ZipFile(wheel).extractall(fresh)
    dependencies = sysconfig.get_path("purelib")
    names = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in zipfile.ZipFile(wheel).namelist()
        if name.endswith(".py")
    )
    program = (
        f"import importlib, sys; sys.path.append({dependencies!r})\n"
        f"for name in {names!r}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error:\n"
        f"        assert error.name.partition('.')[0] in {OPTIONAL!r}, (name, error.name)\n"
        "import inferd.engine.api as api\n"
        f"assert api.__file__.startswith({fresh!r}), api.__file__\n"
        "from inferd.engine.api.locate import locate\n"
        "weights = locate('tiny') / 'model.safetensors'\n"
        f"assert weights.is_file() and weights.is_relative_to({fresh!r}), weights\n"
    )
    subprocess.run([python, "-P", "-c", program], check=True, cwd=tmp_path)


def test_no_folder_is_importable_under_a_bare_name() -> None:
    """The working folder is the repository's root, and the interpreter's flags are those of the daemon's own
    processes."""
    program = (
        "import importlib.util\n"
        "found = [name for name in ('server', 'engine', 'kernels') if importlib.util.find_spec(name)]\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, cwd=ROOT)
