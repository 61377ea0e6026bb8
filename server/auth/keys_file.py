"""The keys file, which lists keys with their tenants and quotas. Reads and checks it, and makes new entries.

The file holds only the SHA-256 of a key. A slow hash, as for passwords, would protect against lists of likely keys, and
each request would pay for it. Keys are 256 random bits, so there is no such list. This file knows no requests and no
clock.
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
from inferd.engine.api.files import read_regular

OTHER_TENANTS = "other"
"""Label of metrics for all tenants without a label of their own. No tenant has this name."""
KEY_PREFIX = "sk-inferd-"
_KEY_BYTES = 32
MAX_FILE_BYTES = 4 * 2**20
"""Maximum size of the file: about 20,000 keys."""
_MAX_SHOWN = 5
"""Maximum number of problems that a refusal of the file names."""


def _is_digest(text: str) -> str:
    if len(text) != 64 or set(text.lower()) - set("0123456789abcdef"):
        raise ValueError("must be the 64 hexadecimal digits of a key's SHA-256; `inferd keys new` makes such an entry")
    return text.lower()


def _is_name(text: str) -> str:
    if not text.isprintable() or not text.strip():
        raise ValueError("must be printable and not empty")
    return text


def _is_tenant(text: str) -> str:
    if text == OTHER_TENANTS:
        raise ValueError("is the label of all tenants that the metrics do not name; choose another name")
    return text


_Name = Annotated[str, Field(max_length=128), AfterValidator(_is_name)]
_Limit = Annotated[int, Field(ge=1, le=10**12)]


class KeyEntry(BaseModel):
    """One key with its quota. None means unlimited."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    sha256: Annotated[str, AfterValidator(_is_digest)]
    """SHA-256 of the key, in hexadecimal."""
    name: _Name
    """Name of the key in logs."""
    tenant: Annotated[_Name, AfterValidator(_is_tenant)] | None = None
    """Tenant of the key. Keys of one tenant share cached prefixes, stored responses and a fair share; None: no other
    key shares them."""
    weight: Annotated[float, Field(ge=0.000_001, le=1_000_000, allow_inf_nan=False)] = 1.0
    """Weight of the tenant's fair share, which counts when other tenants wait too."""
    concurrent_requests: _Limit | None = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    """Maximum number of tokens per minute, prompts and answers together."""

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256)

    @property
    def tenant_id(self) -> str:
        """Id that separates this tenant's prefixes from others'. No named tenant's id equals that of a lone key."""
        return tenant_id(self.digest) if self.tenant is None else "tenant-" + _hex(self.tenant.encode())


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    keys: list[KeyEntry]


def digest_of(key: str) -> bytes:
    """The digest by which a key is stored and found."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def tenant_id(digest: bytes) -> str:
    """The id of a key that is a tenant of its own."""
    return digest.hex()[:32]


def _hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """All entries of a YAML or JSON file. Raises `ConfigError`, which names the first problems and no digest."""
    return parse_keys(_read(path), path)


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the keys file {path}: {error.strerror or error}") from error


def parse_keys(data: bytes, path: Path) -> tuple[KeyEntry, ...]:
    """Parse a file's content. Raises `ConfigError`; only its text uses `path`."""
    try:
        entries = _KeysFile.model_validate(_Loader(data.decode("utf-8")).get_single_data()).keys
    except UnicodeDecodeError as error:
        raise ConfigError(f"the keys file {path} is not UTF-8 at byte {error.start}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}" if mark is not None else "its start"
        raise ConfigError(f"the keys file {path}, {place}: {getattr(error, 'problem', error)}") from error
    except (ValidationError, RecursionError) as error:
        raise ConfigError(f"the keys file {path}: {_problems(error)}") from error
    except (ArithmeticError, AttributeError, LookupError, ValueError) as error:
        # YAML's own types raise these: it reads a name such as 2024-02-30 as a date, and that day does not exist.
        raise ConfigError(f"the keys file {path} holds a value that YAML cannot read; put it in quotes") from error
    _check_apart(entries, path)
    return tuple(entries)


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses aliases (they can grow without bound) and repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed here", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):  # any other key is refused below
                if key.value in names:
                    problem = f"{key.value!r} appears twice in one mapping"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                names.add(key.value)
        return super().construct_mapping(node, deep)


_MESSAGES = {
    "missing": "the entry needs this field",
    "extra_forbidden": f"there is no such field; an entry may have {', '.join(KeyEntry.model_fields)}",
}
"""Pydantic's type of error -> the text that replaces its message."""


def _problems(error: ValidationError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    texts = []
    for detail in error.errors(include_url=False, include_input=False):
        place = ".".join(str(part + 1) if isinstance(part, int) else str(part) for part in detail["loc"])
        if place in ("", "keys"):
            return "expected `keys:` and a list of entries, as `inferd keys new` makes them"
        message = _MESSAGES.get(detail["type"], detail["msg"].removeprefix("Value error, "))
        texts.append(f"{place}: {message}")
    more = f"; and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
    return "; ".join(texts[:_MAX_SHOWN]) + more


def _check_apart(entries: Iterable[KeyEntry], path: Path) -> None:
    """Raises `ConfigError` if two entries have the same key or name, or if a tenant has two weights."""
    digests: dict[str, str] = {}
    names: set[str] = set()
    weights: dict[str, float] = {}
    for entry in entries:
        if entry.sha256 in digests:
            raise ConfigError(f"the keys file {path}: {digests[entry.sha256]!r} and {entry.name!r} are the same key")
        if entry.name in names:
            raise ConfigError(
                f"the keys file {path}: two keys have the name {entry.name!r}, so logs could not distinguish them: "
                "choose another name, or remove one of them"
            )
        if entry.tenant is not None and weights.setdefault(entry.tenant, entry.weight) != entry.weight:
            raise ConfigError(
                f"the keys file {path}: the keys of tenant {entry.tenant!r} have weights {weights[entry.tenant]:g} and "
                f"{entry.weight:g}; give them one weight"
            )
        digests[entry.sha256] = entry.name
        names.add(entry.name)


def new_key() -> str:
    """A key of 256 random bits. Its characters need no quotes in a shell or a header."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def entry_of(**fields: object) -> KeyEntry:
    """Make an entry. Raises `ConfigError` if a field breaks a rule."""
    try:
        return KeyEntry.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"this key cannot be made: {_problems(error)}") from error


def entry_text(entry: KeyEntry) -> str:
    """The entry as an item of a YAML list."""
    fields = entry.model_dump(exclude_defaults=True)
    # Values are written as in JSON: a name such as `yes`, and a digest of digits alone, must stay texts.
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items()]
    return "  - " + "\n    ".join(lines) + "\n"


def append_entry(path: Path, entry: KeyEntry) -> None:
    """Write the file again with one more entry. A reader sees either the old file or the new one.

    Two writers wait for each other. Raises `ConfigError` if the file is invalid, or would be with the entry.
    """
    try:
        path = path.resolve()
    except (OSError, RuntimeError) as error:  # a link to itself
        raise ConfigError(f"cannot add to the keys file {path}: {error}") from error
    with _locked(path.parent):
        _append(path, entry)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock the directory. The file cannot be locked: each change replaces it, and at first it does not exist."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cannot add to a keys file in {directory}: {error.strerror or error}") from error
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot lock directories
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
