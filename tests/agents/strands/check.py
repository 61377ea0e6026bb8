"""Strands Agents over Chat Completions."""

from __future__ import annotations

from agent import MEND, MENDED, MODEL, Project, call, edit_file, plan, read_file, run_tests, when
from checks import BASE_URL, KEY, check, run
from pydantic import BaseModel
from strands import Agent, tool
from strands.models.openai import OpenAIModel

FUNCTIONS = [tool(function) for function in (read_file, edit_file, run_tests)]


class Report(BaseModel):
    """What was done."""

    file: str
    is_mended: bool


@check
def a_task() -> None:
    """a task, the same conversation again, and a typed result"""
    project = Project()
    project.enter()
    model = OpenAIModel(client_args={"base_url": BASE_URL, "api_key": KEY}, model_id=MODEL)
    agent = Agent(model=model, tools=FUNCTIONS, callback_handler=None)
    answer = str(agent(f"Mend calc.py. {MEND}")).strip()
    assert answer == "It is mended.", answer
    project.check_mended()
    answer = str(
        agent(f"And again. {plan([call('read_file', path='calc.py')], when(MENDED, 'It was mended.'))}")
    ).strip()
    assert answer == "It was mended.", answer
    task = plan([call("Report", file="calc.py", is_mended=True)], "I have told it.")
    result = agent(f"Tell it. {task}", structured_output_model=Report)
    assert result.structured_output == Report(file="calc.py", is_mended=True), result


run()
