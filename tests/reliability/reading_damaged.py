"""A program that starts with damaged checkpoints as a server does, each in a fork of its own, and prints the result.

`python -m tests.reliability.reading_damaged --seed S --count N [--first I] [--serve-every K]` prints a line of JSON for
each case. Its libraries are imported once. The kernel ends a fork that takes too much processor time, and refuses it
more memory than a start may take.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from inferd.engine.api.errors import ModelError, StartError
from inferd.engine.api.process.logs import LogStyle, configure
from inferd.engine.api.wire.messages import LoadAdapter, Submit
from inferd.engine.api.wire.params import Adapter, SamplingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.worker.adapter_loader import AdapterLoader
from inferd.engine.worker.executor import ThreadExecutor, WorkerThread
from inferd.engine.worker.load import load_worker
from inferd.server.commands.plan_table import run as run_plan
from inferd.server.config.settings import Settings
from inferd.server.lifecycle.models import read_models
from inferd.server.lifecycle.ready_card import StartupReport

from .damaging import KINDS, Case, write_bases, write_case

READ_CPU_S, SERVE_CPU_S = 5, 25
"""Most seconds of processor time to read a checkpoint as `inferd plan` and `inferd serve` do, and to load its weights
and answer a request besides."""
WAIT_S = 120
"""Most seconds for a case that blocks. A busy machine needs many."""
MORE_BYTES = 2**31
"""Most bytes of address space that a start takes, besides what this program has."""
_NUM_TOKENS = 4
_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one start."""

    index: int
    name: str
    """The case's name."""
    phase: str
    """The phase that began last: "read", "load" or "answer"."""
    error: str
    """Class of the `StartError`; empty if the checkpoint was read, or a request answered."""
    message: str
    fault: str
    """Any other end: an exception with its traceback, or the signal by which the kernel ended it."""
    cpu_s: float
    log: str
    """All that the process wrote to standard output and standard error."""


def outcome_of(index: int, case: Case, log: Path, *, is_served: bool) -> Outcome:
    """Start with a case in a forked process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        _begin(case, log, writer, is_served=is_served)
    os.close(writer)
    with open(reader, encoding="utf-8") as told:
        phase, error, message, fault = ("read", "", "", "")
        for line in told:
            phase, error, message, fault = json.loads(line)
    _, status, used = os.wait4(pid, 0)
    if status:
        fault = fault or f"the process ended with {os.waitstatus_to_exitcode(status)}"
    log_text = log.read_text(errors="replace")
    return Outcome(index, case.name, phase, error, message, fault, used.ru_utime + used.ru_stime, log_text)


def _begin(case: Case, log: Path, told: int, *, is_served: bool) -> None:
    """The forked process, which never returns. It writes a line before each phase, so that the last line is true of a
    process that the kernel ended."""
    for stream in (_STDOUT, _STDERR):  # libraries write to both
        os.dup2(os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND), stream)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(WAIT_S)

    def tell(phase: str, error: str = "", message: str = "", fault: str = "") -> None:
        nonlocal now
        now = phase
        os.write(told, json.dumps([phase, error, message, fault]).encode() + b"\n")

    now = "read"
    try:
        _bound_cpu(READ_CPU_S)
        tell("read")
        report = _read(case)
        if is_served and case.is_served:
            _bound_cpu(SERVE_CPU_S)
            _serve(report, tell)
    except StartError as error:
        tell(now, type(error).__name__, str(error))
    except BaseException:
        tell(now, fault=traceback.format_exc()[-3_000:])
    finally:
        os._exit(0)


def _bound_cpu(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def _read(case: Case) -> StartupReport | None:
    """Reads the checkpoint as `inferd plan` does, and then as `inferd serve` does. Raises `StartError`. Returns None
    for a case that is only planned."""
    configure(LogStyle())
    settings = Settings.load({**case.settings, "device": "cpu", "num_threads": "1"}, None)
    refusal: StartError | None = None
    for as_json in (False, True):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                run_plan(settings, 1, None, "10-20", as_json=as_json)
        except StartError as error:
            refusal = error
    if case.is_served:
        return read_models(settings)[0]
    if refusal is not None:
        raise refusal
    return None


def _serve(report: StartupReport, tell: Callable[[str], None]) -> None:
    """Loads the weights, and answers a request with the model's own tokens, or with those of an adapter."""
    tell("load")
    torch.set_num_threads(1)
    config, model = report.config, report.model
    runner, ready = load_worker(config, time.monotonic(), lambda phase: None)
    thread = WorkerThread()
    executor = ThreadExecutor(runner, thread)
    if config.draft is not None:
        return  # the warm-up steps have run it
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=ready.max_model_len,
    )
    cache = KVCache(ready.num_blocks, ready.block_size, runner.cache_windows, step_tokens=config.max_num_batched_tokens)
    core = EngineCore(Scheduler(limits, cache), executor, vocab_size=ready.vocab_size)
    adapter = None
    for name, files in report.adapters.items():
        assert runner.model.adapters is not None
        loader, adapter = AdapterLoader(runner.model.adapters, runner.arch, thread), Adapter(0, files.digest)
        loader.load(LoadAdapter(adapter, str(files.path), name))
        while not (loaded := loader.ended()):
            time.sleep(0.001)
        if loaded[0].error:
            raise ModelError(loaded[0].error)
        core.add_adapter(adapter)
    tell("answer")
    ids = [token for token in model.tokenizer.encode("How are you?", add_special=True) if token < ready.vocab_size]
    params = SamplingParams(max_tokens=_NUM_TOKENS, seed=1, temperature=0.0, adapter=adapter)
    core.submit(Submit(request_id="a", prompt_ids=tuple(ids) or (1,), params=params), 0.0)
    answer = list[int]()
    while core.has_work:
        output = core.step(0.0)
        answer += [token for delta in output.deltas for token in delta.token_ids] if output else []
    core.check()
    model.tokenizer.decode(answer, skip_special=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--serve-every", type=int, default=3, help="load weights in each case of this many")
    parser.add_argument("--whole", action="store_true", help="start first with one whole checkpoint of each kind")
    parser.add_argument("--keep", type=Path, help="folder that keeps the checkpoints")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home = asked.keep or Path(temporary)
        write_bases(home / "whole")
        gc.freeze()
        damaged = [(index, "") for index in range(asked.first, asked.first + asked.count)]
        for index, kind in [*(enumerate(KINDS, -len(KINDS)) if asked.whole else ()), *damaged]:
            folder = home / str(index)
            case = write_case(f"{asked.seed} {index}", home / "whole", folder, whole=kind)
            is_served = index % asked.serve_every == 0 or bool(kind)
            print(json.dumps(asdict(outcome_of(index, case, home / "log", is_served=is_served))), flush=True)
            if not asked.keep:
                shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
