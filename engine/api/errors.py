"""The errors that cross rooms, as one tree. Each says the rule, the value and the way out.

InferdError
|-- StartError            the server cannot start as asked; printed as one line, exit code in `exit_code`
|   |-- ModelError        the checkpoint: not found, unknown architecture, contradiction, truncated, unsafe
|   |-- ConfigError       a setting, alone or against another
|   `-- CapacityError     it does not fit: what it needs, what there is, what would fit
|-- RequestError          one request is refused, with the OpenAI code it is refused with
`-- EngineDeadError       the engine process is gone, and nothing can be generated
"""

from __future__ import annotations

from typing import Self


class InferdError(Exception):
    """Root of everything raised on purpose."""


class StartError(InferdError):
    """Why the server did not start, in one line a person can act on."""

    exit_code = 1


class ModelError(StartError):
    """The checkpoint cannot be served."""

    exit_code = 3


class ConfigError(StartError):
    """A setting cannot be honoured."""

    exit_code = 2


class CapacityError(StartError):
    """The model does not fit; the message carries the numbers."""

    exit_code = 4


def start_error(kind: str, message: str) -> StartError:
    """The error that another process named by its class; an unknown name becomes the root of its kind."""
    kinds = {error.__name__: error for error in (ModelError, ConfigError, CapacityError)}
    return kinds.get(kind, StartError)(message)


class RequestError(InferdError):
    """One request cannot be served as asked.

    `code` is a key of the server's error table, `param` the field as the caller spelt it.
    """

    def __init__(self, code: str, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        """`retry_after_s`: when to come back, where that is known better than by the error table."""
        super().__init__(message)
        self.code, self.message, self.param, self.retry_after_s = code, message, param, retry_after_s

    def reworded(self, message: str, param: str | None) -> Self:
        """The same refusal in other words: class, code, `retry_after_s` and a subclass's own fields stay."""
        twin = type(self).__new__(type(self), message)
        twin.__dict__.update(self.__dict__)
        twin.message, twin.param = message, param
        return twin


class EngineDeadError(InferdError):
    """The engine process ended; `detail` says how."""
