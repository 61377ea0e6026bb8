"""OpenAI Agents over Responses and over Chat Completions: functions, handoffs, and the SDK's own tools."""

from __future__ import annotations

import subprocess

import agents
from agent import BROKEN, MEND, MENDED, MODEL, TESTED, Project, call, edit_file, plan, read_file, run_tests, when
from agents import (
    Agent,
    ApplyPatchTool,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ShellTool,
    WebSearchTool,
    apply_diff,
    function_tool,
)
from checks import BASE_URL, KEY, check, run
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)
MODELS = (OpenAIResponsesModel, OpenAIChatCompletionsModel)
FUNCTIONS = [function_tool(function) for function in (read_file, edit_file, run_tests)]


def agent(kind: type = OpenAIResponsesModel, **options: object) -> Agent:
    client = AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
    return Agent(**{"name": "mender", "model": kind(model=MODEL, openai_client=client), **options})


@check
async def a_task() -> None:
    """a task by functions, plain and streamed"""
    for kind in MODELS:
        project = Project(kind.__name__)
        project.enter()
        result = await Runner.run(agent(kind, tools=FUNCTIONS), f"Mend calc.py. {MEND}")
        assert result.final_output == "It is mended.", result.final_output
        project.check_mended()
        again = plan([call("read_file", path="calc.py")], when(MENDED, "It was mended."))
        history = [*result.to_input_list(), {"role": "user", "content": f"And again. {again}"}]
        streamed = Runner.run_streamed(agent(kind, tools=FUNCTIONS), history)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == "It was mended.", streamed.final_output


@check
async def a_handoff() -> None:
    """an agent hands a task to another"""
    for kind in MODELS:
        project = Project(f"{kind.__name__}-handoff")
        project.enter()
        reader = agent(kind, name="reader", tools=FUNCTIONS)
        task = plan([call("transfer_to_reader")], [call("read_file", path="calc.py")], when(BROKEN, "I have read it."))
        result = await Runner.run(agent(kind, handoffs=[reader]), f"Read calc.py. {task}")
        assert result.final_output == "I have read it.", result.final_output
        assert result.last_agent.name == "reader"


class Editor:
    """Applies the model's patches."""

    def update_file(self, operation: object) -> str:
        text = apply_diff(read_file(operation.path), operation.diff)
        with open(operation.path, "w") as file:
            file.write(text)
        return f"{operation.path} was written."

    create_file = delete_file = update_file


def shell(request: object) -> str:
    commands = request.data.action.commands
    done = [subprocess.run(line, shell=True, capture_output=True, text=True, check=False) for line in commands]
    return "".join(each.stdout + each.stderr for each in done)


@check
async def the_tools_of_the_sdk() -> None:
    """its shell and its apply_patch"""
    project = Project("own")
    project.enter()
    diff = f"@@\n-    {BROKEN}\n+    {MENDED}\n"
    task = plan(
        [call("shell", commands=["cat calc.py"])],
        when(BROKEN, [call("apply_patch", type="update_file", path="calc.py", diff=diff)]),
        [call("shell", commands=["python3 test_calc.py"])],
        when(TESTED, "It is mended."),
    )
    result = await Runner.run(agent(tools=[ShellTool(executor=shell), ApplyPatchTool(editor=Editor())]), task)
    assert result.final_output == "It is mended.", result.final_output
    project.check_mended()


@check
async def web_search_beside_functions() -> None:
    """web search, which this server lacks, beside functions"""
    project = Project("web")
    project.enter()
    result = await Runner.run(agent(tools=[*FUNCTIONS, WebSearchTool()]), f"Mend calc.py. {MEND}")
    assert result.final_output == "It is mended.", result.final_output


run()
