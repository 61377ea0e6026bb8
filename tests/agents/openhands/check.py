"""OpenHands' command line program by litellm, over Chat Completions."""

from __future__ import annotations

from agent import BROKEN, MENDED, MODEL, TESTED, Project, call, plan, when
from checks import BASE_URL, KEY, check, run

VARIABLES = {
    "LLM_MODEL": f"openai/{MODEL}",
    "LLM_BASE_URL": BASE_URL,
    "LLM_API_KEY": KEY,
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENHANDS_SUPPRESS_BANNER": "1",
}

SAFE = {"security_risk": "LOW", "summary": "I go on"}
"""Fields of every call."""


@check
def a_task() -> None:
    """a task"""
    project = Project()
    path = str(project.calc)
    task = plan(
        [call("file_editor", command="view", path=path, **SAFE)],
        when(BROKEN, [call("file_editor", command="str_replace", path=path, old_str=BROKEN, new_str=MENDED, **SAFE)]),
        [call("terminal", command="python3 test_calc.py", **SAFE)],
        when(TESTED, [call("finish", message="It is mended.", **SAFE)]),
    )
    command = ["openhands", "--headless", "--json", "--override-with-envs", "--task", f"Mend calc.py. {task}"]
    said = project.run(command, **VARIABLES)
    assert "FinishAction" in said, said
    project.check_mended()


run()
