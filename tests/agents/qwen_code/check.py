"""Qwen Code over Chat Completions."""

from __future__ import annotations

from agent import BROKEN, MENDED, MODEL, Project, call, mending, plan, when
from checks import BASE_URL, KEY, check, run

VARIABLES = {
    "OPENAI_API_KEY": KEY,
    "OPENAI_BASE_URL": BASE_URL,
    "OPENAI_MODEL": MODEL,
    "QWEN_CODE_DISABLE_AUTOUPDATE": "1",
}


def qwen(project: Project, prompt: str, *flags: str) -> str:
    """Run the program with this task, and return its output."""
    return project.run(["qwen", "--auth-type", "openai", "--yolo", *flags, "--prompt", prompt], **VARIABLES)


@check
def a_task_and_its_session() -> None:
    """a task, and a session that goes on"""
    project = Project()
    path = str(project.calc)
    task = mending(
        call("read_file", file_path=path),
        call("edit", file_path=path, old_string=BROKEN, new_string=MENDED),
        call("run_shell_command", command="python3 test_calc.py", is_background=False),
    )
    said = qwen(project, f"Mend calc.py. {task}")
    assert "It is mended." in said, said
    project.check_mended()
    again = plan([call("read_file", file_path=path)], when(MENDED, "It was mended."))
    said = qwen(project, f"And again. {again}", "--continue")
    assert "It was mended." in said, said


run()
