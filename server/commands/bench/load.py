"""Sends the requests: a closed loop keeps N of them in flight, an open loop starts each at its time.

In an open loop a request's clock starts when it was due. The figures then show it if the generator or the server falls
behind. This file knows requests as bytes with the length of their answer, and answers as outcomes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import orjson

from inferd.server.commands.bench.answer import Outcome, StreamReader
from inferd.server.commands.bench.client import Client, ClientError, Reply
from inferd.server.commands.bench.options import LoadOptions
from inferd.server.commands.bench.prompts import LoadRequest

LAG_PERIOD_S = 0.005

OnDone = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The outcomes of a load run, and how well the generator kept up."""

    outcomes: tuple[Outcome, ...]
    duration_s: float
    loop_lags_s: tuple[float, ...]
    """Lateness of the event loop, sampled every `LAG_PERIOD_S`."""
    cpu_share: float
    """Share of one core that the generator used."""


def arrival_offsets(options: LoadOptions) -> Iterator[float]:
    """When each request of an open loop is due, in seconds from the start. Random gaps have the mean 1/rate."""
    assert options.rate is not None
    rng, due = random.Random(f"{options.seed}/arrivals"), 0.0
    for _ in range(options.num_requests):
        yield due
        # A gamma distribution with mean 1/rate. Shape 1 is the exponential distribution of Poisson arrivals.
        is_random, scale_s = options.arrivals == "poisson", 1.0 / (options.rate * options.burstiness)
        due += rng.gammavariate(options.burstiness, scale_s) if is_random else 1.0 / options.rate


async def send(client: Client, options: LoadOptions, request: LoadRequest, start_s: float) -> Outcome:
    """Send one request and read its whole answer. A failure is an outcome too."""
    reader = StreamReader(start_s, request.output_len)
    try:
        reply = await client.post(options.path, request.body, reader.on_event)
    except ClientError as error:
        return Outcome(start_s=start_s, error=str(error))
    if reply.status != 200:
        return _refused(start_s, reply)
    return reader.outcome()


def _refused(start_s: float, reply: Reply) -> Outcome:
    """Failures are grouped by status and code, because the message may name the request."""
    try:
        error = orjson.loads(reply.body)["error"]
        code, message = error["code"], str(error.get("message") or "") or None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        code = message = None
    return Outcome(start_s=start_s, error=f"HTTP {reply.status}" + (f" {code}" if code else ""), message=message)


async def closed_loop(
    client: Client, options: LoadOptions, requests: Iterable[LoadRequest], on_done: OnDone | None = None
) -> list[Outcome]:
    """Keep `concurrency` requests in flight until none is left."""
    left, outcomes = iter(requests), []

    async def worker() -> None:
        for request in left:
            outcome = await send(client, options, request, time.perf_counter())
            outcomes.append(outcome)
            if on_done is not None:
                on_done(outcome)

    async with asyncio.TaskGroup() as group:
        for _ in range(options.concurrency):
            group.create_task(worker())
    return outcomes


async def open_loop(
    client: Client, options: LoadOptions, requests: Iterable[LoadRequest], on_done: OnDone
) -> list[Outcome]:
    """Start each request when it is due."""
    outcomes: list[Outcome] = []
    began_s = time.perf_counter()

    async def one(request: LoadRequest, due_s: float) -> None:
        outcomes.append(await send(client, options, request, due_s))
        on_done(outcomes[-1])

    async with asyncio.TaskGroup() as group:
        for offset_s, request in zip(arrival_offsets(options), requests, strict=True):
            await asyncio.sleep(began_s + offset_s - time.perf_counter())
            group.create_task(one(request, began_s + offset_s))
    return outcomes


async def run_load(client: Client, options: LoadOptions, requests: Iterable[LoadRequest], on_done: OnDone) -> LoadRun:
    """Send the measured requests. They are made beforehand, which keeps that work out of the load."""
    ready = list(requests)
    lags: list[float] = []
    probe = asyncio.create_task(_probe_lag(lags))
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    loop = open_loop if options.rate is not None else closed_loop
    outcomes = await loop(client, options, ready, on_done)
    duration_s = time.perf_counter() - began_s
    probe.cancel()
    return LoadRun(tuple(outcomes), duration_s, tuple(lags), (time.process_time() - cpu_began_s) / duration_s)


async def _probe_lag(lags: list[float]) -> None:
    while True:
        due_s = time.perf_counter() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        lags.append(max(0.0, time.perf_counter() - due_s))
