"""mini-swe-agent by litellm, over Chat Completions and over Responses."""

from __future__ import annotations

from agent import BROKEN, HOME, MENDED, MODEL, TESTED, Project, call, plan, when
from checks import BASE_URL, KEY, check_each, run

VARIABLES = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_API_BASE": BASE_URL,
    "OPENAI_API_KEY": KEY,
}


def bash(command: str) -> dict[str, object]:
    return call("bash", command=command)


@check_each(("litellm", "litellm_response"))
def a_task(model_class: str) -> None:
    """a task"""
    project = Project(model_class)
    edit = bash(f"sed -i 's/{BROKEN}/{MENDED}/' calc.py")
    end = bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    task = plan([bash("cat calc.py")], when(BROKEN, [edit]), [bash("python3 test_calc.py")], when(TESTED, [end]))
    command = ["mini", "--yolo", "--exit-immediately", "--model-class", model_class, "--model", f"openai/{MODEL}"]
    project.run([*command, "--output", str(HOME / "run.json"), "--task", f"Mend calc.py. {task}"], **VARIABLES)
    project.check_mended()
    assert '"exit_status": "Submitted"' in (HOME / "run.json").read_text()


run()
