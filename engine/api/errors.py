"""The errors that cross packages, as one tree. Each message has the rule, the value and what would work.

InferdError
|-- StartError            the server cannot start as asked; printed as one line, exit code in `exit_code`
|   |-- ModelError        the checkpoint: not found, unknown architecture, contradiction, truncated, unsafe
|   |-- ConfigError       a setting, alone or together with another one
|   `-- CapacityError     the model does not fit: memory needed, memory available, settings that would fit
|-- RequestError          one request is refused, with its OpenAI error code
`-- EngineDeadError       the engine process is gone, and nothing can be generated
"""

from __future__ import annotations

from typing import Self


class InferdError(Exception):
    """Root of all errors that inferd raises on purpose."""


class StartError(InferdError):
    """The reason why the server did not start, in one line that tells the user what to do."""

    exit_code = 1


class ModelError(StartError):
    """The checkpoint cannot be served."""

    exit_code = 3


class ConfigError(StartError):
    """A setting cannot be honoured."""

    exit_code = 2


class CapacityError(StartError):
    """The model does not fit; the message has the numbers."""

    exit_code = 4


def start_error(kind: str, message: str) -> StartError:
    """An error from another process, made from its class name. An unknown name gives a `StartError`."""
    kinds = {error.__name__: error for error in (ModelError, ConfigError, CapacityError)}
    return kinds.get(kind, StartError)(message)


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
