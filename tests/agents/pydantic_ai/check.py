"""Pydantic AI over each of the three APIs, with a typed result."""

from __future__ import annotations

from agent import MEND, MENDED, MODEL, Project, call, edit_file, plan, read_file, run_tests, when
from checks import BASE_URL, KEY, URL, check_each, run
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = OpenAIProvider(base_url=BASE_URL, api_key=KEY)
MODELS = {
    "chat": OpenAIChatModel(MODEL, provider=OPENAI),
    "responses": OpenAIResponsesModel(MODEL, provider=OPENAI),
    "messages": AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY)),
}
FUNCTIONS = (read_file, edit_file, run_tests)


class Report(BaseModel):
    file: str
    is_mended: bool


@check_each(MODELS)
def a_task(api: str) -> None:
    """a task, and a typed result of the same conversation"""
    project = Project(api)
    project.enter()
    first = Agent(MODELS[api], tools=FUNCTIONS).run_sync(f"Mend calc.py. {MEND}")
    assert first.output == "It is mended.", first.output
    project.check_mended()
    tell = call("final_result", file="calc.py", is_mended=True)
    again = plan([call("read_file", path="calc.py")], when(MENDED, [tell]))
    typed = Agent(MODELS[api], tools=FUNCTIONS, output_type=Report)
    second = typed.run_sync(f"And again. {again}", message_history=first.all_messages())
    assert second.output == Report(file="calc.py", is_mended=True), second.output


run()
