"""smolagents over Chat Completions: an agent that calls tools, and one that writes code."""

from __future__ import annotations

from agent import BROKEN, MENDED, MODEL, TESTED, Project, call, edit_file, plan, read_file, run_tests, when
from checks import BASE_URL, KEY, check, run
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

FUNCTIONS = [tool(function) for function in (read_file, edit_file, run_tests)]
MODEL_ = OpenAIServerModel(MODEL, api_base=BASE_URL, api_key=KEY)


@check
def calls() -> None:
    """an agent that calls tools"""
    project = Project("calls")
    project.enter()
    task = plan(
        [call("read_file", path="calc.py")],
        when(BROKEN, [call("edit_file", path="calc.py", old=BROKEN, new=MENDED)]),
        [call("run_tests")],
        when(TESTED, [call("final_answer", answer="It is mended.")]),
    )
    answer = ToolCallingAgent(tools=FUNCTIONS, model=MODEL_, max_steps=6).run(f"Mend calc.py. {task}")
    assert answer == "It is mended.", answer
    project.check_mended()


@check
def code() -> None:
    """an agent that writes code"""
    project = Project("code")
    project.enter()
    task = plan(
        "<code>\nprint(read_file(path='calc.py'))\n</code>",
        when(BROKEN, f"<code>\nprint(edit_file(path='calc.py', old='{BROKEN}', new='{MENDED}'))\n</code>"),
        "<code>\nprint(run_tests())\n</code>",
        when(TESTED, "<code>\nfinal_answer('It is mended.')\n</code>"),
    )
    answer = CodeAgent(tools=FUNCTIONS, model=MODEL_, max_steps=6).run(f"Mend calc.py. {task}")
    assert answer == "It is mended.", answer
    project.check_mended()


run()
