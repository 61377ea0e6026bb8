"""The checkpoint's tokenizer: text -> ids exactly as the checkpoint defines it, without torch.

Calls are thread-safe and hold the interpreter lock only briefly. Truncation and padding that a tokenizer file may carry
are switched off: a prompt is never cut in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import Tokenizer as Backend
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from inferd.engine.api.errors import ModelError
from inferd.server.text.token_bytes import TokenBytes


class Tokenizer:
    """Text -> ids, and the table back."""

    __slots__ = ("_backend", "added_tokens", "bytes", "eos_token_id", "special_ids", "special_tokens")

    def __init__(self, backend: Backend, special_tokens: Mapping[str, object], eos_token_id: int | None) -> None:
        """`special_tokens`: what chat templates may name, such as "bos_token". Raises `ModelError`."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bytes = TokenBytes(backend)
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        """Those that are found in a text before it is split: text -> id."""
        self.special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        """Of these, those that a text does not show."""
        self.special_tokens = dict(special_tokens)
        self.eos_token_id = eos_token_id

    @property
    def num_tokens(self) -> int:
        """Tokens with a text; the embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special: bool) -> tuple[int, ...]:
        """The ids of `text`; `add_special` puts what the checkpoint begins (and ends) a text with."""
        # `encode` holds the interpreter lock throughout (2.2 s for 2 MB); the batch call for a hundredth of that.
        return tuple(self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)

    def decode(self, token_ids: Iterable[int], skip_special: bool) -> str:
        """The text that these ids are, read from its beginning."""
        return self.bytes.join(token_ids, skip_special).decode("utf-8", "replace")

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None where there is none."""
        return self._backend.id_to_token(token_id)


def load_pretrained(path: Path) -> TokenizersBackend:
    """The checkpoint's tokenizer as transformers reads it. Raises `ModelError`."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")):
        raise ModelError(f"{path.name} holds no tokenizer: expected tokenizer.json beside the weights")
    try:
        pretrained = TokenizersBackend.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the libraries underneath raise bare Exception for a file they cannot read
        raise ModelError(f"the tokenizer of {path.name} cannot be loaded: {str(error)[:300]}") from error
    if not isinstance(pretrained, TokenizersBackend):
        raise ModelError(f"the tokenizer of {path.name} is a {type(pretrained).__name__}, which is not served")
    return pretrained
