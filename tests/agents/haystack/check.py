"""Haystack's agent over Chat Completions and over Responses."""

from __future__ import annotations

from agent import MEND, MENDED, MODEL, Project, call, edit_file, plan, read_file, run_tests, when
from checks import BASE_URL, KEY, check_each, run
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

FUNCTIONS = [create_tool_from_function(function) for function in (read_file, edit_file, run_tests)]
GENERATORS = {"chat": OpenAIChatGenerator, "responses": OpenAIResponsesChatGenerator}


@check_each(GENERATORS)
def a_task(api: str) -> None:
    """a task, and the same conversation again"""
    project = Project(api)
    project.enter()
    generator = GENERATORS[api](model=MODEL, api_base_url=BASE_URL, api_key=Secret.from_token(KEY))
    agent = Agent(chat_generator=generator, tools=FUNCTIONS)
    first = agent.run(messages=[ChatMessage.from_user(f"Mend calc.py. {MEND}")])
    assert first["last_message"].text == "It is mended.", first["last_message"]
    project.check_mended()
    again = plan([call("read_file", path="calc.py")], when(MENDED, "It was mended."))
    second = agent.run(messages=[*first["messages"], ChatMessage.from_user(f"And again. {again}")])
    assert second["last_message"].text == "It was mended.", second["last_message"]


run()
