"""A `Submit` as the wire brought it, checked again and made into a `Request`: the engine trusts no server.

Knows no scheduler and no live requests.
"""

from __future__ import annotations

from math import inf

from inferd.engine.api.wire.messages import Submit
from inferd.engine.api.wire.params import ParamError, check_token_ids
from inferd.engine.request import Request


def check(submit: Submit, vocab_size: int) -> None:
    """Raise `ParamError` for parameters or ids that this model cannot have, or an output longer than was asked for."""
    submit.params.check(vocab_size)
    if not submit.prompt_ids:
        raise ParamError("prompt", submit.prompt_ids, "must hold at least one token")
    check_token_ids("prompt", submit.prompt_ids, vocab_size)
    check_token_ids("emitted_ids", submit.emitted_ids, vocab_size)
    if not 0.0 < submit.weight < inf:
        raise ParamError("weight", submit.weight, "must be a number above 0")
    if len(submit.emitted_ids) > submit.params.max_tokens:
        rule = f"must hold at most max_tokens ({submit.params.max_tokens}) ids"
        raise ParamError("emitted_ids", len(submit.emitted_ids), rule)


def request_of(submit: Submit, max_model_len: int, now: float) -> Request:
    """The request of a `Submit` that passed `check`. `now`: monotonic seconds; it arrived no later."""
    return Request.create(
        submit.request_id,
        submit.prompt_ids,
        submit.params,
        max_model_len=max_model_len,
        arrival_s=min(submit.arrival_s, now) if submit.arrival_s > 0 else now,
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        emitted_ids=submit.emitted_ids,
        alone_until=submit.alone_until,
        ttft_target_s=submit.ttft_target_s,
        tpot_target_s=submit.tpot_target_s,
        tenant=submit.tenant,
        weight=submit.weight,
    )
