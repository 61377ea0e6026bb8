"""DSPy over Chat Completions: ReAct, whose calls are fields of its answers."""

from __future__ import annotations

import json

import dspy
from agent import BROKEN, MENDED, MODEL, TESTED, Project, edit_file, plan, read_file, run_tests, when
from checks import BASE_URL, KEY, check, run


def fields(**texts: str) -> str:
    """An answer in the way of DSPy's chat adapter."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{text}" for name, text in {**texts, "completed": ""}.items())


def step(name: str, **arguments: str) -> str:
    """A turn of ReAct."""
    return fields(next_thought="I go on.", next_tool_name=name, next_tool_args=json.dumps(arguments))


@check
def a_task() -> None:
    """a task"""
    project = Project()
    project.enter()
    dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=KEY, cache=False))
    task = plan(
        step("read_file", path="calc.py"),
        when(BROKEN, step("edit_file", path="calc.py", old=BROKEN, new=MENDED)),
        step("run_tests"),
        when(TESTED, step("finish")),
        fields(reasoning="It was done.", answer="It is mended."),
        mark="## observation_",
    )
    react = dspy.ReAct("task -> answer", tools=[read_file, edit_file, run_tests], max_iters=5)
    said = react(task=f"Mend calc.py. {task}").answer
    assert said == "It is mended.", said
    project.check_mended()


run()
