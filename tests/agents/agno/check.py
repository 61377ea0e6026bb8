"""Agno over Chat Completions and over Responses."""

from __future__ import annotations

from agent import MEND, MENDED, MODEL, Project, call, edit_file, plan, read_file, run_tests, when
from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike
from checks import BASE_URL, KEY, check_each, run

MODELS = {"chat": OpenAILike, "responses": OpenAIResponses}


@check_each(MODELS)
def a_task(api: str) -> None:
    """a task, and the same session again, streamed"""
    project = Project(api)
    project.enter()
    model = MODELS[api](id=MODEL, base_url=BASE_URL, api_key=KEY)
    tools = [read_file, edit_file, run_tests]
    agent = Agent(model=model, tools=tools, db=InMemoryDb(), add_history_to_context=True, telemetry=False)
    answer = agent.run(f"Mend calc.py. {MEND}", session_id="1").content
    assert answer.endswith("It is mended."), answer
    project.check_mended()
    again = plan([call("read_file", path="calc.py")], when(MENDED, "It was mended."))
    answer = "".join(
        event.content
        for event in agent.run(f"And again. {again}", session_id="1", stream=True)
        if event.event == "RunContent" and event.content
    )
    assert answer.endswith("It was mended."), answer


run()
