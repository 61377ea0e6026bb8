"""The errors that cross packages, as one tree. Each message has the rule, the value and what would work.

InferdError
|-- StartError            the server cannot start as asked; printed as one line, exit code in `exit_code`
|   |-- ModelError        the checkpoint: not found, unknown architecture, contradiction, truncated, unsafe
|   |   `-- ChangedError  files or kernels are no longer those that the server started with
|   |-- ConfigError       a setting, alone or together with another one
|   |   `-- LaunchError   a kernel that the GPU can never launch
|   `-- CapacityError     the model does not fit: memory needed, memory available, settings that would fit
|-- RequestError          one request is refused, with its OpenAI error code
|-- KVStoreError          a KV segment was not read or not written (`kv_store/segment`)
`-- EngineDeadError       the engine process is gone, and nothing can be generated
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from typing import Self

from inferd.engine.arch.shown import clipped


class InferdError(Exception):
    """Root of all errors that inferd raises on purpose."""


class StartError(InferdError):
    """The reason why the server did not start, in one line that tells the user what to do. It is cut if it is long,
    because a file that it quotes may hold anything."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(clipped(message))


class ModelError(StartError):
    """The checkpoint cannot be served."""

    exit_code = 3


class ChangedError(ModelError):
    """An engine would compute other answers than those before it, because a file or the kernels are others."""


class ConfigError(StartError):
    """A setting cannot be honoured."""

    exit_code = 2


class LaunchError(ConfigError):
    """The GPU can never launch a kernel that the model needs with these settings, so no further start would help."""


class CapacityError(StartError):
    """The model does not fit; the message has the numbers."""

    exit_code = 4


def start_error(kind: str, message: str) -> StartError:
    """An error from another process, made from its class name. An unknown name gives a `StartError`."""
    kinds = {error.__name__: error for error in (ModelError, ChangedError, ConfigError, LaunchError, CapacityError)}
    return kinds.get(kind, StartError)(message)


_REFUSALS = (
    "allocate memory", "Cannot allocate", "not enough memory", "bad_alloc", "start new thread", "failed to map segment",
)  # fmt: skip
"""Parts of what libraries say if the system refuses them memory or a thread. Such errors have no class of their
own."""


def shortage(error: BaseException) -> str | None:
    """Text that says that the system gave no more memory or threads, and what to do; None if `error` means something
    else. If the address space is limited, any error may mean that, because some libraries drop the reason."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    bound = (
        "" if limit == resource.RLIM_INFINITY else f"the address space is limited to {limit // 2**20} MiB (ulimit -v)"
    )
    what = f"{type(error).__name__}: {error}".removesuffix(": ")
    if any(map(_is_refused, _with_causes(error))):
        bound = f"; {bound}" if bound else ""
        return f"the system refused memory or a thread ({what}){bound}; free memory, or raise the limits (ulimit -a)"
    return f"{what}; perhaps memory is short: {bound} too tightly; raise the limit" if bound else None


def _is_refused(error: BaseException) -> bool:
    is_refusal = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    return is_refusal or any(part in str(error) for part in _REFUSALS)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class RequestError(InferdError):
    """One request cannot be served as asked.

    `code` is a key of the server's error table. `param` is the field as the client spelt it.
    """

    def __init__(self, code: str, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        """`retry_after_s`: seconds until a retry makes sense; None for the value in the error table."""
        super().__init__(message)
        self.code, self.message, self.param, self.retry_after_s = code, message, param, retry_after_s

    def reworded(self, message: str, param: str | None) -> Self:
        """A copy with another message and param. Class, code, `retry_after_s` and a subclass's own fields stay."""
        copy = type(self).__new__(type(self), message)
        copy.__dict__.update(self.__dict__)
        copy.message, copy.param = message, param
        return copy


class EngineDeadError(InferdError):
    """The engine process ended; the message says how."""
