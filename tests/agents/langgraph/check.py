"""LangGraph's agent over Chat Completions and over Responses, with a conversation that it keeps."""

from __future__ import annotations

from agent import MEND, MENDED, MODEL, Project, call, edit_file, plan, read_file, run_tests, when
from checks import BASE_URL, KEY, check_each, run
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent

FUNCTIONS = [tool(function) for function in (read_file, edit_file, run_tests)]


@check_each(("chat", "responses"))
def a_task(api: str) -> None:
    """a task, and the same conversation again"""
    project = Project(api)
    project.enter()
    model = ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=KEY, use_responses_api=api == "responses")
    graph = create_react_agent(model, FUNCTIONS, checkpointer=InMemorySaver())

    def said(text: str) -> str:
        answer = graph.invoke({"messages": [("user", text)]}, {"configurable": {"thread_id": "1"}})
        return str(answer["messages"][-1].text)

    answer = said(f"Mend calc.py. {MEND}")
    assert answer == "It is mended.", answer
    project.check_mended()
    answer = said(f"And again. {plan([call('read_file', path='calc.py')], when(MENDED, 'It was mended.'))}")
    assert answer == "It was mended.", answer


run()
