"""No task outlives its request. The server runs in this process, so that all of its tasks can be listed."""

from __future__ import annotations

import asyncio
import gc

from inferd.server.text.model import ServedModel
from tests.api.conftest import app_settings
from tests.reliability.conftest import wait_until
from tests.reliability.fuzzing import requests
from tests.reliability.test_fuzz import SEED, check, send_all

from .conftest import ScriptedRouter, serving

NUM_OWN_TASKS = 4
"""Number of tasks of an idle server: uvicorn's loop, its lifespan, the app's own, and the one for freed memory."""


def num_tasks() -> int:
    """Tasks of any loop of this process that have not ended."""
    return sum(isinstance(item, asyncio.Task) and not item.done() for item in gc.get_objects())


def test_no_task_outlives_its_request(model: ServedModel) -> None:
    router = ScriptedRouter(model)
    with serving(model, router, app_settings(access_log=False)) as url:
        send_all(url, list(requests(SEED - 1, 100)))
        wait_until(lambda: num_tasks() <= NUM_OWN_TASKS, 20, "the loop is idle")
        for answer in send_all(url, list(requests(SEED + 1, 300))):
            check(*answer)
        wait_until(lambda: num_tasks() <= NUM_OWN_TASKS, 20, "every task has ended")
