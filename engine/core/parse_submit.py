"""Checks a `Submit` again and makes it a `Request`: the engine trusts no server.

Knows no scheduler and no live requests.
"""

from __future__ import annotations

from inferd.engine.api.wire.messages import Submit
from inferd.engine.api.wire.params import ParamError, check_token_ids
from inferd.engine.request import Request


def check(submit: Submit, vocab_size: int) -> None:
    """Raise `ParamError` for values that this model cannot take, or an output longer than requested."""
    submit.params.check(vocab_size)
    submit.scheduling.check()
    if not submit.prompt_ids:
        raise ParamError("prompt", submit.prompt_ids, "must hold at least one token")
    check_token_ids("prompt", submit.prompt_ids, vocab_size)
    check_token_ids("emitted_ids", submit.emitted_ids, vocab_size)
    if len(submit.emitted_ids) > submit.params.max_tokens:
        rule = f"must hold at most max_tokens ({submit.params.max_tokens}) ids"
        raise ParamError("emitted_ids", len(submit.emitted_ids), rule)


def request_of(submit: Submit, max_model_len: int, now: float) -> Request:
    """The request of a `Submit` that passed `check`. `now`: monotonic seconds; its arrival is no later."""
    return Request.create(
        submit.request_id,
        submit.prompt_ids,
        submit.params,
        submit.scheduling.arrived_by(now),
        max_model_len=max_model_len,
        emitted_ids=submit.emitted_ids,
    )
