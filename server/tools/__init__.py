"""How a model writes reasoning and tool calls, and how the server parses them.

`detect` finds the checkpoint's `Format`: its own `response_template`, or one of `builtin`. `AnswerParser` turns the
text of an answer into pieces of reasoning, calls and content as it arrives. `answer_rules` says what a request allows.
"""
