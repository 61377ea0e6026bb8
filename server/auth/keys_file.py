"""The keys file: who may call, for which tenant, and how much. Reads it, checks all of it, and makes new entries.

A key stands there as its SHA-256 alone. That is enough because keys are 256 random bits: no list of likely keys can be
tried against the digest, which is what slow hashes of passwords are for, and a slow hash would be paid at each request.
Knows no requests and no clock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from inferd.engine.api.errors import ConfigError
from inferd.server.config.regular_file import read_regular

KEY_PREFIX = "sk-inferd-"
_KEY_BYTES = 32
MAX_FILE_BYTES = 4 * 2**20
"""Some 20,000 keys."""
_MAX_SHOWN = 5
"""Problems of a file that its refusal names."""


def _is_digest(text: str) -> str:
    if len(text) != 64 or set(text.lower()) - set("0123456789abcdef"):
        raise ValueError("must be the 64 hexadecimal digits of a key's SHA-256; `inferd keys new` makes an entry")
    return text.lower()


def _is_name(text: str) -> str:
    if not text.isprintable() or not text.strip():
        raise ValueError("must be printable and not empty")
    return text


_Name = Annotated[str, Field(max_length=128), AfterValidator(_is_name)]
_Limit = Annotated[int, Field(ge=1, le=10**12)]


class KeyEntry(BaseModel):
    """One key. Quotas are of the key; None: no bound."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    sha256: Annotated[str, AfterValidator(_is_digest)]
    """Of the key, in hexadecimal."""
    name: _Name
    """What logs call it."""
    tenant: _Name | None = None
    """Keys of one tenant share cached prefixes, stored responses and one fair share; None: the key is alone."""
    weight: Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)] = 1.0
    """Of the tenant's fair share, where others want the machine too."""
    concurrent_requests: _Limit | None = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    """Of prompts and answers together."""

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256)

    @property
    def tenant_id(self) -> str:
        """What keeps its prefixes apart from others': never a name that another key's digest could be."""
        return tenant_id(self.digest) if self.tenant is None else "tenant-" + _hex(self.tenant.encode())


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    keys: list[KeyEntry]


def digest_of(key: str) -> bytes:
    """What a key is known by."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def tenant_id(digest: bytes) -> str:
    """Of a key that is a tenant of its own."""
    return digest.hex()[:32]


def _hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """All entries of a file, YAML or JSON. Raises `ConfigError`, with every problem up to a few, and no digest."""
    return parse_keys(_read(path), path)


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the keys file {path}: {error.strerror or error}") from error


def parse_keys(data: bytes, path: Path) -> tuple[KeyEntry, ...]:
    """Raises `ConfigError`; `path` is for its text alone."""
    try:
        entries = _KeysFile.model_validate(_Loader(data.decode("utf-8")).get_single_data()).keys
    except UnicodeDecodeError as error:
        raise ConfigError(f"the keys file {path} is not UTF-8 at byte {error.start}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark is not None else "its start"
        raise ConfigError(f"the keys file {path}, {where}: {getattr(error, 'problem', error)}") from error
    except (ValidationError, RecursionError) as error:
        raise ConfigError(f"the keys file {path}: {_problems(error)}") from error
    except (ArithmeticError, AttributeError, LookupError, ValueError) as error:
        # Of YAML's own types: a name such as 2024-02-30 is a date to it, and no such day.
        raise ConfigError(f"the keys file {path} holds a value that cannot be read; quote it") from error
    _check_apart(entries, path)
    return tuple(entries)


class _Loader(yaml.SafeLoader):
    """Safe, without anchors that grow, and without a key that stands twice and would win in silence."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not read here", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value]
        for i, name in enumerate(names):
            if name in names[:i]:
                problem = f"{name!r} appears twice in one mapping"
                raise yaml.constructor.ConstructorError(None, None, problem, node.value[i][0].start_mark)
        return super().construct_mapping(node, deep)


_TOLD = {
    "missing": "the entry needs this field",
    "extra_forbidden": f"there is no such field; an entry may have {', '.join(KeyEntry.model_fields)}",
}
"""By pydantic's type of error, what is said in place of its message."""


def _problems(error: ValidationError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    texts = []
    for detail in error.errors(include_url=False, include_input=False):
        where = ".".join(str(part + 1) if isinstance(part, int) else str(part) for part in detail["loc"])
        if where in ("", "keys"):
            return "expected `keys:` and a list of entries, as `inferd keys new` makes them"
        told = _TOLD.get(detail["type"], detail["msg"].removeprefix("Value error, "))
        texts.append(f"{where}: {told}")
    more = f"; and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
    return "; ".join(texts[:_MAX_SHOWN]) + more


def _check_apart(entries: Iterable[KeyEntry], path: Path) -> None:
    """Raises `ConfigError` where one key, or one name, is two entries, or a tenant has two weights."""
    digests: dict[str, str] = {}
    names: set[str] = set()
    weights: dict[str, float] = {}
    for entry in entries:
        if entry.sha256 in digests:
            raise ConfigError(f"the keys file {path}: {digests[entry.sha256]!r} and {entry.name!r} are the same key")
        if entry.name in names:
            raise ConfigError(
                f"the keys file {path}: two keys have the name {entry.name!r}, and logs could not tell them: choose "
                "another name, or remove one of them"
            )
        if entry.tenant is not None and weights.setdefault(entry.tenant, entry.weight) != entry.weight:
            raise ConfigError(
                f"the keys file {path}: the keys of tenant {entry.tenant!r} have weights {weights[entry.tenant]:g} and "
                f"{entry.weight:g}; a tenant has one"
            )
        digests[entry.sha256] = entry.name
        names.add(entry.name)


def new_key() -> str:
    """256 random bits, in letters that no shell and no header needs quotes for."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def entry_of(**fields: object) -> KeyEntry:
    """Raises `ConfigError` for what no entry may say."""
    try:
        return KeyEntry.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"no such key can be made: {_problems(error)}") from error


def entry_text(entry: KeyEntry) -> str:
    """An item of the list, in YAML."""
    fields = entry.model_dump(exclude_defaults=True)
    # As JSON writes it: a name such as `yes`, and a digest of digits alone, must stay texts.
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items()]
    return "  - " + "\n    ".join(lines) + "\n"


def append_entry(path: Path, entry: KeyEntry) -> None:
    """Write the file anew with one entry more, at once: who reads it meanwhile sees the old or the new one.

    Two at once wait for each other. Raises `ConfigError` where the file, or what it would become, is none.
    """
    try:
        path = path.resolve()
    except (OSError, RuntimeError) as error:  # a link to itself
        raise ConfigError(f"cannot add to the keys file {path}: {error}") from error
    with _locked(path.parent):
        _append(path, entry)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Of the directory, as the file in it is another one after each change, and is not there before the first."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cannot add to a keys file in {directory}: {error.strerror or error}") from error
    try:
        with contextlib.suppress(OSError):  # some network file systems lock no directories
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _append(path: Path, entry: KeyEntry) -> None:
    old = "keys:\n"
    if path.exists():
        data = _read(path)
        _check_apart((*parse_keys(data, path), entry), path)
        old = data.decode()
        old += "" if old.endswith("\n") else "\n"
    text = old + entry_text(entry)
    try:
        parse_keys(text.encode(), path)
    except ConfigError as error:
        raise ConfigError(f"an entry cannot be added at the end of {path}; add it by hand: {error}") from error
    _replace(path, text)


def _replace(path: Path, text: str) -> None:
    old = path.stat() if path.exists() else None
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            new = os.stat(file.name)
            if old is not None and (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
                os.chown(file.name, old.st_uid, old.st_gid)  # the server must still be able to read it
            os.chmod(file.name, old.st_mode & 0o777 if old is not None else 0o600)
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write the keys file {path}: {error.strerror or error}") from error
