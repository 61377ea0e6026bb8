"""`inferd doctor`: checks whether this machine can serve. Each check is one line, with a remedy if something is wrong.

The doctor changes nothing. It imports torch in a child process, so that a hang or crash of the import is a finding.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE
from packaging.requirements import Requirement
from rich.console import Console

from inferd.engine.api import kept_content, weight_cache
from inferd.engine.api.errors import ConfigError
from inferd.engine.api.files import cache_folder, refuse_others
from inferd.engine.api.machine import gpu as accelerator
from inferd.engine.api.machine.cpu import COMPILERS
from inferd.engine.api.machine.gpu import Accelerator, NoAcceleratorError
from inferd.server.config.settings import Settings
from inferd.server.transport.limits import LEAST_CONNECTIONS, RESERVED_FILES, connections_within

GIB = 1024**3
MIN_MEMORY_BYTES = 2 * GIB
MIN_DISK_BYTES = 5 * GIB
TORCH_TIMEOUT_S = 60
NVIDIA_SMI_TIMEOUT_S = 15

TORCH_PROBE = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads(), "gpus": gpus,
                  "cpu": torch.backends.cpu.get_cpu_capability(), "mkldnn": torch.backends.mkldnn.is_available(),
                  "bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported()}))
"""
"""Program of a child process. It prints one line of JSON."""

KERNELS_PROBE = """
import json, torch
from inferd.kernels.cpu import library, native, product_rates
reason = native.prepare(library.default_cache_dir(), may_build=False).reason
threads = torch.get_num_threads()
rates = {} if reason else product_rates.measure(threads)
print(json.dumps({"level": native.level(), "name": native.library_name(), "reason": reason, "threads": threads,
                  "rates": rates}))
"""
"""The same: it loads the kernels of the image or of the cache, and builds none."""

FORMS_PROBE = """
import json
from inferd.kernels.compile import aot
from inferd.kernels.device import DeviceProperties
device = DeviceProperties.of(%d, 1)
forms = [form for form in aot.all_shipped() if form.min_sm <= device.sm <= form.max_sm]
fewer = [form.op for form in forms if form.stages_on(device.sm) < form.num_stages]
print(json.dumps({"capability": device.capability, "is_known": device.is_known, "shared_kib": device.shared_bytes >> 10,
                  "forms": len(forms), "fewer": len(fewer), "ops": sorted(set(fewer))}))
"""
"""The same, of the forms of the GPU's kernels. It compiles nothing."""

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `way_out` is empty if nothing is wrong."""

    name: str
    status: Status
    found: str
    way_out: str = ""


def run(as_json: bool) -> int:
    """Run and print all checks. Returns 1 if any of them failed."""
    checks = list(examine())
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        show(checks, Console(highlight=False))
    return 1 if any(check.status == "fail" for check in checks) else 0


def show(checks: list[Check], console: Console) -> None:
    style = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for check in checks:
        console.print(f"[{style[check.status]}]{check.status:<4}[/]  {check.name:<9} ", end="")
        console.print(check.found, markup=False, soft_wrap=True)
        if check.way_out:
            console.print(f"      {'':<9} -> {check.way_out}", markup=False, soft_wrap=True)


def examine() -> Iterator[Check]:
    settings, check = load_settings()
    yield check
    yield check_port(settings.host, settings.port)
    yield check_open_files(settings.max_connections)
    looks = (check_python, check_packages, check_torch, check_cpu, check_memory, check_cache, check_kept)
    for look in (*looks, check_compiler, check_products):
        yield look()
    yield (gpu := check_gpu())
    if gpu.status == "ok":
        with contextlib.suppress(NoAcceleratorError, PackageNotFoundError):
            yield check_forms(accelerator.detect())


def load_settings() -> tuple[Settings, Check]:
    """The settings of the environment, or the defaults if those are refused."""
    try:
        settings = Settings.load({})
    except ConfigError as error:
        return Settings(), Check("settings", "fail", str(error), "correct the variable or the file that it names")
    if settings.warnings:
        return settings, Check("settings", "warn", "; ".join(settings.warnings), "correct or unset the variable")
    changed = [f"{name} from {origin}" for name, _, origin in settings.explain() if origin != "default"]
    return settings, Check("settings", "ok", ", ".join(changed) or "all at their defaults")


def check_python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} at {sys.executable}")


def check_packages() -> Check:
    """Compares the requirements of inferd with the installed packages."""
    wrong, num_right = [], 0
    for requirement in map(Requirement, requires("inferd") or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if requirement.specifier.contains(installed, prereleases=True):
            num_right += 1
        else:
            wrong.append(f"{requirement.name} is {installed}, but must be {requirement.specifier}")
    if wrong:
        return Check("packages", "fail", "; ".join(wrong), "pip install --upgrade inferd")
    return Check("packages", "ok", f"inferd {version('inferd')} and the {num_right} packages that it requires")


def probe(program: str) -> dict[str, Any] | str:
    """The facts that a child process prints, which imports torch. Otherwise the last line of its error."""
    command = [sys.executable, "-P", "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the import of torch took more than {TORCH_TIMEOUT_S} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"the process ended with code {done.returncode}"])[-1]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_torch() -> Check:
    found = probe(TORCH_PROBE)
    if isinstance(found, str):
        return Check("torch", "fail", found, "reinstall it: https://pytorch.org/get-started/locally")
    shown = (
        f"{found['version']}, {found['threads']} threads, {found['cpu']}, GPUs: {', '.join(found['gpus']) or 'none'}"
    )
    if not found["mkldnn"]:
        return Check(
            "torch", "warn", shown, "this build has no oneDNN, so models run slowly: install the official wheel"
        )
    if not found["bf16"]:
        way_out = "this CPU has no fast bfloat16: --dtype float32 (INFERD_DTYPE) may be faster"
        return Check("torch", "warn", shown, way_out)
    return Check("torch", "ok", shown)


def check_cpu() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    flags = next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    fast = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8") if flag in flags]
    return Check("cpu", "ok", f"{usable} cores, {platform.machine()} {' '.join(fast)}".rstrip())


def check_memory() -> Check:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        way_out = "set --kv-memory (INFERD_KV_MEMORY), because inferd cannot measure the memory here"
        return Check("memory", "warn", "unknown on this system", way_out)
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    available = sizes["MemAvailable"]
    shown = f"{available / GIB:.1f} GiB available of {sizes['MemTotal'] / GIB:.1f}"
    if available < MIN_MEMORY_BYTES:
        return Check("memory", "warn", shown, "enough for the embedded model only: free or add memory")
    return Check("memory", "ok", shown)


def check_cache() -> Check:
    """Checks whether the Hugging Face cache is writable and has space for a model."""
    cache = Path(HF_HUB_CACHE)
    place = existing(cache)
    offline = ", offline (HF_HUB_OFFLINE)" if HF_HUB_OFFLINE else ""
    if not is_writable(place):
        return Check("cache", "warn", f"{cache} is not writable", "set HF_HOME to a directory that you may write to")
    free = shutil.disk_usage(place).free
    shown = f"{cache}, {free / GIB:.1f} GiB free{offline}"
    if free < MIN_DISK_BYTES:
        way_out = "too little for most models: free some space, or set HF_HOME to a directory on a larger disk"
        return Check("cache", "warn", shown, way_out)
    return Check("cache", "ok", shown)


def check_kept() -> Check:
    """Checks whether servers can keep for the next start what takes long to make."""
    folders = [cache_folder(name) for name in (kept_content.FOLDER, weight_cache.FOLDER)]
    closed = [folder for folder in folders if not is_writable(existing(folder))]
    if closed:
        way_out = (
            "each start makes the tokenizer and packs the weights anew: set XDG_CACHE_HOME to a directory that you may "
            "write to"
        )
        return Check("kept", "warn", f"{closed[0]} is not writable", way_out)
    try:
        for folder in folders:
            refuse_others(folder)
    except OSError as error:
        return Check("kept", "warn", f"{error.filename} is not used", str(error.strerror))
    num_bytes = sum(file.num_bytes for file in weight_cache.files_in(folders[1]))
    free = shutil.disk_usage(existing(folders[1])).free
    found = f"{num_bytes / GIB:.1f} GiB of packed weights in {folders[1].parent}, {free / GIB:.1f} GiB free"
    return Check("kept", "ok", found)


def existing(path: Path) -> Path:
    """The path, or the folder above it in which it would be made."""
    return next(each for each in (path, *path.parents) if each.exists())


def is_writable(directory: Path) -> bool:
    """Tries it with a file that is deleted at once: mode bits let root write even on a read-only file system."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def check_port(host: str, port: int) -> Check:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        way_out = "choose another with --port or --host (INFERD_PORT, INFERD_HOST)"
        return Check("port", "warn", f"{host}:{port}: {error.strerror}", way_out)
    return Check("port", "ok", f"{host}:{port} is free")


def check_open_files(max_connections: int) -> Check:
    """Checks the limit on open files. `inferd serve` raises the soft limit itself, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num = connections_within(hard, max_connections)
    soft_text, hard_text = ("none" if limit == resource.RLIM_INFINITY else f"{limit:,}" for limit in (soft, hard))
    shown = f"soft limit {soft_text}, hard limit {hard_text}: enough for "
    if num == max_connections:
        return Check("files", "ok", f"{shown}all {num} connections of --max-connections")
    way_out = f"raise the hard limit to {max_connections + RESERVED_FILES} (ulimit -Hn, systemd's LimitNOFILE=, "
    way_out += "Docker's --ulimit nofile=), or set --max-connections (INFERD_MAX_CONNECTIONS) lower"
    found = f"{shown}{max(num, 0)} of the {max_connections} connections of --max-connections"
    return Check("files", "warn" if num >= LEAST_CONNECTIONS else "fail", found, way_out)


def check_compiler() -> Check:
    """Checks whether the CPU kernels can be built, or are there already, as in the container image."""
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is not None:
        return Check("compiler", "ok", f"{found}; kernels are cached under XDG_CACHE_HOME or ~/.cache")
    kernels = probe(KERNELS_PROBE)
    if not isinstance(kernels, str) and not kernels["reason"]:
        return Check("compiler", "ok", f"none is needed: there is {kernels['name']}")
    why = kernels if isinstance(kernels, str) else kernels["reason"]
    way_out = "install g++ 11 or newer: without it inferd computes in plain PyTorch, which is several times slower"
    return Check("compiler", "warn", f"no C++ compiler for the CPU kernels, and none to load: {why}", way_out)


def check_products() -> Check:
    """Says what this processor's products give if every operand is in a register, which bounds what prompts take."""
    found = probe(KERNELS_PROBE)
    if isinstance(found, str):
        return Check("products", "warn", found, "reinstall torch, which the line `torch` is about")
    if found["reason"]:
        return Check("products", "ok", f"not measured: {found['reason']}; the first start builds the kernels")
    rates = ", ".join(f"{rate / 1e9:,.0f} in {kind}" for kind, rate in found["rates"].items())
    return Check("products", "ok", f"10^9 operations a second from registers: {rates} ({found['threads']} threads)")


def check_gpu() -> Check:
    """Detects the GPU as `inferd serve` does. It runs nvidia-smi first, because a broken driver may hang its caller."""
    tool, seen = shutil.which("nvidia-smi"), "no GPU found"
    if tool is not None:
        query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            way_out = "reload the driver: if torch is built for CUDA, `inferd serve` may hang too"
            return Check("gpu", "warn", "nvidia-smi does not answer", way_out)
        seen = "; ".join(done.stdout.strip().splitlines()) if done.returncode == 0 else "nvidia-smi fails"
    try:
        found = accelerator.detect()
    except (NoAcceleratorError, PackageNotFoundError) as error:
        found_text = f"{seen}; `inferd serve` will use the CPU"
        return Check("gpu", "ok", found_text) if tool is None else Check("gpu", "warn", found_text, str(error))
    size = f"{found.memory_free_bytes / GIB:.1f} GiB free of {found.memory_total_bytes / GIB:.1f}"
    return Check("gpu", "ok", f"{found.name}, {size}; `inferd serve` will use it unless --device is cpu")


def check_forms(gpu: Accelerator) -> Check:
    """Says which forms of kernels the GPU gets."""
    major, minor = gpu.capability
    said = probe(FORMS_PROBE % (10 * major + minor))
    if isinstance(said, str):
        return Check("forms", "warn", said, "plain PyTorch computes everything: install Triton")
    memory = f"{said['shared_kib']} KiB of shared memory a program"
    found = f"{said['forms']:,} forms of kernels for compute capability {said['capability']} with {memory}"
    if said["fewer"]:
        found += f", {said['fewer']} of them with fewer stages than elsewhere ({', '.join(said['ops'])})"
    if said["is_known"]:
        return Check("forms", "ok", found)
    return Check("forms", "warn", found, "none was compiled for this GPU: it gets the safest forms, which may be slow")
