"""Chooses the replica for each request: the one that would have to compute least before its first token.
With one replica there is no choice, and nothing is remembered.

That is the part of the prompt that the replica's prefix cache should not hold, behind the prompts that wait there
already. Each stream there counts as some tokens more, because it takes part in every step. What a cache should hold is
known from the requests that were sent there: the chain of hashes of their blocks, as the engine's own index has it, for
as many blocks as the cache has. A wrong guess costs time and never a token.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from inferd.engine.api.wire.messages import Submit
from inferd.server.dispatch.replica import Replica, Replicas
from inferd.server.dispatch.token_stream import TokenStream

STREAM_TOKENS = 64
"""Prompt tokens that a stream counts for. A decode and a token of a prompt each take a row of a step. So this is about
how much of the stream's answer a new request would share the engine with."""
_MAX_BLOCKS = 2**17
"""Most blocks of one replica that are remembered: some 20 MB."""
_KEY_BYTES = 16


class LoadBalancer:
    """The choice among replicas."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._only = replicas[0] if len(replicas) == 1 else None
        self._seen: tuple[OrderedDict[bytes, None], ...] = tuple(OrderedDict() for _ in replicas)
        """Keys of the blocks that each replica should hold, the longest unused first."""
        self._num_placed = 0
        self._last_placed = [0] * len(replicas)

    def place(self, submit: Submit, emitted_ids: Sequence[int] = ()) -> Replica | None:
        """The replica for a request behind the tokens already delivered; None if no engine takes requests.

        The request counts as waiting there until `began` or `ended`.
        """
        if self._only is not None:
            return self._only if self._only.is_up else None
        up = [replica for replica in self._replicas if replica.is_up]
        if not up:
            return None
        keys = self._keys(submit, emitted_ids)
        num_tokens = len(submit.prompt_ids) + len(emitted_ids)
        uncached = {replica.index: self._uncached(replica, keys, num_tokens) for replica in up}
        best = min(up, key=lambda replica: self._cost(replica, uncached[replica.index]))
        best.waiting[submit.request_id] = uncached[best.index]
        self._num_placed += 1
        self._last_placed[best.index] = self._num_placed
        self._remember(best, keys)
        return best

    def ended(self, replica: Replica, stream: TokenStream) -> None:
        """A request has ended there: the next turn of its conversation finds its answer too."""
        if stream.emitted_ids and self._only is None:
            self._remember(replica, self._keys(stream.submit, stream.emitted_ids))

    def forget(self, replica: Replica) -> None:
        """Its prefix cache is empty."""
        self._seen[replica.index].clear()

    def _cost(self, replica: Replica, num_tokens: int) -> tuple[int, int, int]:
        """Number of tokens that the request would wait for there. Among equals, fewer streams win, and then the replica
        that was chosen longest ago."""
        num_streams = len(replica.streams)
        waiting = sum(replica.waiting.values())
        return num_tokens + waiting + STREAM_TOKENS * num_streams, num_streams, self._last_placed[replica.index]

    def _uncached(self, replica: Replica, keys: Sequence[bytes], num_tokens: int) -> int:
        """Number of the request's tokens that the replica's cache should not hold."""
        seen = self._seen[replica.index]
        num_blocks = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
        return num_tokens - num_blocks * self._block_size

    def _remember(self, replica: Replica, keys: Sequence[bytes]) -> None:
        """As the engine evicts them, a block is older than those before it in its chain."""
        seen = self._seen[replica.index]
        for key in reversed(keys):
            seen[key] = None
            seen.move_to_end(key)
        assert replica.ready is not None
        while len(seen) > min(replica.ready.num_blocks, _MAX_BLOCKS):
            seen.popitem(last=False)

    def _keys(self, submit: Submit, emitted_ids: Sequence[int]) -> list[bytes]:
        """The key of each full block of a request."""
        params, scheduling = submit.params, submit.scheduling
        root = f"{scheduling.cache_salt}\0{params.adapter.digest if params.adapter is not None else ''}"
        ids, size = array("i", submit.prompt_ids), self._block_size
        ids.extend(emitted_ids)
        content, width = ids.tobytes(), size * ids.itemsize
        key, keys = root.encode(), []
        for start in range(0, len(content) - width + 1, width):
            key = hashlib.blake2b(key + content[start : start + width], digest_size=_KEY_BYTES).digest()
            keys.append(key)
        return keys

    @property
    def _block_size(self) -> int:
        return next(replica.ready.block_size for replica in self._replicas if replica.ready is not None)
