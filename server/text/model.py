"""The served model as the HTTP side needs it: names, tokenizer, chat template, defaults and limits, without weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from inferd.engine.api.checkpoint import Documents, draws_tokens
from inferd.engine.api.classifier_folder import NO_JUDGE, ClassifierFolder
from inferd.engine.api.errors import ModelError, StartError
from inferd.engine.api.gguf import is_gguf
from inferd.engine.api.pinned_files import PinnedFile
from inferd.engine.api.process.written_once import WrittenOnce
from inferd.engine.api.sentence_folder import PLAIN, SentenceFolder, sentences_of
from inferd.server.config.names import is_reranker_by_name
from inferd.server.errors import messages as errors
from inferd.server.schema.answers.operation import Task
from inferd.server.schema.embeddings import Side
from inferd.server.schema.strict_json import any_json
from inferd.server.text.control_tokens import Begun, ControlTokens, control_tokens_of
from inferd.server.text.fill_in import FillIn
from inferd.server.text.pair_template import PairTemplates, answers_of, qwen3_templates, stated_templates, templates_of
from inferd.server.text.pretrained import pretrained_of
from inferd.server.text.render_workers import OvertimeError, RenderError
from inferd.server.text.template import ChatTemplate
from inferd.server.text.tokenizer import Tokenizer
from inferd.server.tools.builtin import PLAIN_SYNTAX
from inferd.server.tools.detect import AUTO, NO_FORMAT, Clues, Derived, detect
from inferd.server.tools.fallback import Fallback, ToolSupport
from inferd.server.tools.format import Format

logger = logging.getLogger("inferd.server")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults of sampling fields: the checkpoint's recommendations, else OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    """Most tokens of a chat answer; None: all that the context leaves."""


_CLASSIFIES = "ForSequenceClassification"
"""End of the names of architectures with a classifier."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model and its names. Answers carry the first name if the caller names no model."""

    names: tuple[str, ...]
    path: Path
    """The checkpoint's folder, or its GGUF file."""
    root: str
    created: int
    """Unix seconds."""
    max_model_len: int
    """Tokens of prompt and output together."""
    vocab_size: int
    """Embedding rows: the bound for every token id."""
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults
    eos_token_ids: tuple[int, ...]
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    """`model_type` and `architectures` of config.json."""
    format: Format = NO_FORMAT
    """How the model writes reasoning and tool calls."""
    tokenizer_info: bytes = b"{}"
    """JSON of the checkpoint's tokenizer_config.json, with the chat template even if it has a file of its own."""
    fill_in: FillIn | None = None
    """Makes prompts that ask the model for the text between two others; None: no tokens of it ask for that."""
    generates: bool = True
    """Whether it draws tokens: an encoder does not, and no model that was stored without its head."""
    embeds: SentenceFolder = PLAIN
    """How it embeds texts."""
    judges: ClassifierFolder = NO_JUDGE
    """How it judges texts, and pairs of them."""
    pair_templates: PairTemplates | None = None
    """The prompts by which it judges a pair; None: it reads the two texts as its tokenizer joins them."""
    truncation_side: Side = "left"
    """The side of an input for an embedding that is cut, if its request asks for that. A model that embeds loses the
    end, unless its tokenizer says otherwise. Any other loses the beginning, as it does when it generates."""
    trained_dimensions: tuple[int, ...] = ()
    """Numbers of leading components that it was trained for; empty: any."""
    digest: str = ""
    """Hash of the files of the tokenizer and the chat template."""
    files: tuple[PinnedFile, ...] = ()
    """The files that a tokenizer is made from, as the server holds them open."""
    vocabulary: WrittenOnce | None = None
    """The vocabulary of grammars, which all processes of this model share."""

    @property
    def is_made_to_embed(self) -> bool:
        """Whether its folder says how it embeds, or it does nothing else. Others embed if a request names them."""
        return not self.is_made_to_judge and (self.embeds is not PLAIN or not self.generates)

    @property
    def is_made_to_judge(self) -> bool:
        """Whether it gives scores or classes."""
        return self.judges.tokens is not None or any(name.endswith(_CLASSIFIES) for name in self.architectures)

    @property
    def has_classes(self) -> bool:
        """Whether it has a classifier, also one whose labels give a score."""
        return self.is_made_to_judge and self.judges.tokens is None

    @property
    def task(self) -> Task:
        """Task that the model is made for."""
        if self.is_made_to_judge:
            return "rerank" if self.judges.gives_scores(len(self.judges.labels)) else "classify"
        return "embed" if self.is_made_to_embed else "generate"

    @classmethod
    def load(
        cls,
        path: Path,
        names: tuple[str, ...],
        *,
        max_model_len: int,
        vocab_size: int,
        tool_format: str = AUTO,
        reasoning_format: str = AUTO,
        trusts_special_tokens: bool = False,
        documents: Documents | None = None,
    ) -> Self:
        """Read the tokenizer and generation_config.json of a checkpoint folder, or those in a GGUF file. Raises
        `ModelError`.

        `documents`: those of the checkpoint, if they were read already.
        `trusts_special_tokens`: whether control tokens in callers' messages are control tokens, not text.
        """
        read = documents or Documents(path)
        pretrained = pretrained_of(path, read)
        tokenizer = Tokenizer(pretrained.backend, pretrained.special_tokens, pretrained.eos_token_id)
        # Checkpoints that also see have had their template in a file of its own.
        own_file = {} if pretrained.chat_template else read("chat_template.json") or {}
        templates = _templates_of(pretrained.chat_template or own_file.get("chat_template"))
        template = ChatTemplate(templates, tokenizer.special_tokens) if templates else None
        support, derived = _probed(template)
        generation, config = read("generation_config.json") or {}, read("config.json") or {}
        clues = Clues(
            chat_template=templates if isinstance(templates, str) else "\n".join((templates or {}).values()),
            tokens=tokenizer.added_tokens,
            model_type=str(config.get("model_type", "")),
            response_template=_object_or_none("response_template", pretrained.response_template),
            shows_tools=support.tools,
            derived=derived,
        )
        found = detect(clues, tool_format, reasoning_format)
        if template is not None:
            template = template.with_fallback(Fallback(support, found.call_syntax or PLAIN_SYNTAX))
        eos_token_ids = _eos_of(generation, config, tokenizer, vocab_size, found.ends)
        if template is not None and not trusts_special_tokens:
            template = template.with_control_tokens(_control_tokens(template, tokenizer, found, eos_token_ids))
        tokenizer_config = read("tokenizer_config.json") or {}
        stated = tokenizer_config["rerank_template"] if is_gguf(path) else None
        judges, pair_templates = _judging(path, names, config, template, tokenizer, stated)
        judges = judges.bounded(tokenizer_config.get("model_max_length"))
        folder = sentences_of(path, config, read.gguf)
        embeds = folder is not PLAIN or not draws_tokens(config)
        info = {"tokenizer_class": pretrained.class_name, **tokenizer_config}
        return cls(
            names=names,
            path=path,
            root=names[0],
            created=int(time.time()),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            template=template,
            defaults=_defaults_of(generation),
            model_type=str(config.get("model_type", "")),
            architectures=tuple(map(str, config.get("architectures") or ())),
            eos_token_ids=eos_token_ids,
            format=found,
            tokenizer_info=_written({**info, "chat_template": template.source if template else None}),
            generates=draws_tokens(config),
            embeds=folder,
            truncation_side=_truncation_side(tokenizer_config) if embeds else "left",
            trained_dimensions=_dimensions_of(config),
            judges=judges,
            pair_templates=pair_templates,
            fill_in=FillIn.of(tokenizer, vocab_size, tokenizer_config["fim_token_ids"] if is_gguf(path) else {}),
        )


def _truncation_side(tokenizer_config: Mapping[str, object]) -> Side:
    return "left" if tokenizer_config.get("truncation_side") == "left" else "right"


def _dimensions_of(config: Mapping[str, object]) -> tuple[int, ...]:
    """`matryoshka_dimensions` of config.json. Raises `ModelError`."""
    given = config.get("matryoshka_dimensions") or []
    if not isinstance(given, list) or not all(type(value) is int and value > 0 for value in given):
        raise ModelError(f"config.json: matryoshka_dimensions must be numbers above 0, but is {errors.shown(given)}")
    return tuple(given)


def _probed(template: ChatTemplate | None) -> tuple[ToolSupport, Derived]:
    """The parts of tool use that the template shows, and the format that it shows. A template counts as showing every
    part, and no format, if one of its probes takes too long. There are at most 45, each within `QUICK`. Raises
    `StartError` if they could not be rendered."""
    if template is None:
        return ToolSupport(), Derived()
    try:
        support = template.probe()
        return support, template.derive(support)
    except OvertimeError as error:
        logger.warning("cannot tell how the chat template shows tools (%s); the server assumes that it does", error)
        return ToolSupport(), Derived(why_no_calls="the chat template took too long")
    except RenderError as error:
        raise StartError(
            f"the chat template could not be rendered to see whether it shows tools: {error}; see whether the machine "
            "has memory and processes left, and start again"
        ) from error


def _judging(
    path: Path,
    names: tuple[str, ...],
    config: dict[str, Any],
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    stated: str | None,
) -> tuple[ClassifierFolder, PairTemplates | None]:
    """How the model judges pairs, and its prompts for them. Raises `ModelError`.

    Newer folders of Qwen3-Reranker say what it is. Older ones are those of a chat model, so its name must tell.
    `stated`: the prompt that a GGUF file of a reranker has.
    """
    judges = ClassifierFolder.read(path, config)
    if judges.compares_labels:
        return judges, _stated_templates(stated, tokenizer)
    try:
        templates = templates_of(template, tokenizer)
    except RenderError as error:
        logger.warning("cannot tell whether the chat template shows a query and a document: %s", error)
        templates = None
    is_named = is_reranker_by_name(config.get("architectures") or (), (path.name, *names))
    if judges.tokens is None and is_named:
        templates = templates or qwen3_templates(tokenizer)
        judges = replace(judges, tokens=answers_of(tokenizer) if templates is not None else None)
    high = max((judges.tokens.true_id, judges.tokens.false_id)) if judges.tokens is not None else 0
    if high >= tokenizer.num_tokens:
        raise ModelError(f"LogitScore: token ids must be below {tokenizer.num_tokens}, but one is {high}")
    return judges, templates


def _stated_templates(stated: str | None, tokenizer: Tokenizer) -> PairTemplates:
    """The prompts of a GGUF file's reranker: the one that it states, or else Qwen3-Reranker's. Raises `ModelError`."""
    found = qwen3_templates(tokenizer) if stated is None else stated_templates(stated, tokenizer)
    if found is None:
        raise ModelError(
            "the file is a reranker, but its tokenizer cannot put two texts into its prompt, "
            f"tokenizer.chat_template.rerank, which is {errors.shown(stated)}; give the folder that it was made from"
        )
    return found


_PLAIN_TURNS = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."})


def _control_tokens(
    template: ChatTemplate, tokenizer: Tokenizer, form: Format, eos_token_ids: tuple[int, ...]
) -> ControlTokens:
    """The control tokens of the model. An assistant's earlier content may hold those with which the model writes
    reasoning and calls, unless tokens that begin or end a turn belong to them, as in gpt-oss's format."""
    written, markers = template.literals.written, _markers_of(form)
    controls = control_tokens_of(tokenizer, "\0".join((*written, *markers)))
    own = form.special_markers(controls, with_calls=True)
    if own:
        plain = template.plain(_PLAIN_TURNS) or template.plain(_PLAIN_TURNS[1:]) or ""
        ends = {tokenizer.token(token_id) for token_id in eos_token_ids}
        turns = {token for token in controls if token in plain or token in ends}
        mixed = "\0".join(marker for marker in markers if any(token in marker for token in turns))
        own = frozenset(token for token in own - turns if token not in mixed)
    return ControlTokens(controls, tokenizer, own, Begun.of(controls, written, template.literals.names))


def _markers_of(form: Format) -> tuple[str, ...]:
    """The texts around reasoning and around a call."""
    reasoning, call = form.reasoning_syntax, form.call_syntax
    return (
        *((reasoning.begin, reasoning.end, reasoning.answer) if reasoning is not None else ()),
        *((f"{call.before_all}{call.begin}{call.between}{call.end}{call.after_all}",) if call is not None else ()),
    )


def _templates_of(given: object) -> str | dict[str, str] | None:
    """The chat template, or several by name. Raises `ModelError` if one is no text."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, dict) and all(isinstance(text, str) for item in given.items() for text in item):
        return given
    raise ModelError(f"tokenizer_config.json: chat_template must be a text, or texts by name, but is {type(given)}")


def _object_or_none(name: str, given: object) -> dict[str, Any] | None:
    if given is None or isinstance(given, dict):
        return given
    raise ModelError(f"tokenizer_config.json: {name} must be an object, but is {errors.shown(given)}")


def _written(info: dict[str, object]) -> bytes:
    """`info` as JSON. Raises `ModelError` if it is nested too deeply to be encoded."""
    try:
        return any_json(info)
    except RecursionError as error:
        raise ModelError(f"tokenizer_config.json is nested too deeply: {error}") from error


def _defaults_of(generation: dict[str, object]) -> GenerationDefaults:
    """Raises `ModelError` for a recommended value that would be refused in a request."""
    found: dict[str, Any] = {}
    for default in fields(GenerationDefaults):
        value = generation.get(default.name)
        if value is None:
            continue
        kinds, low, high = _BOUNDS[default.name]
        if type(value) not in kinds or not low <= value <= high:  # type: ignore[operator]
            kind = " and whole" if kinds == _WHOLE else ""
            rule = f"{default.name} must be from {low} to {high}{kind}"
            raise ModelError(f"generation_config.json: {rule}, but is {errors.shown(value)}")
        found[default.name] = value
    return GenerationDefaults(**found)


_WHOLE, _ANY = (int,), (int, float)
_MAX_INT32 = 2**31 - 1
"""The sampler counts in 32-bit integers."""
_BOUNDS: dict[str, tuple[tuple[type, ...], float, float]] = {
    "temperature": (_ANY, 0, 2),
    "top_p": (_ANY, 0, 1),
    "top_k": (_WHOLE, 0, _MAX_INT32),
    "min_p": (_ANY, 0, 1),
    "repetition_penalty": (_ANY, 0.01, 100),
    "max_new_tokens": (_WHOLE, 1, _MAX_INT32),
}


def _eos_of(
    generation: dict[str, object],
    config: dict[str, object],
    tokenizer: Tokenizer,
    vocab_size: int,
    ends: tuple[str, ...],
) -> tuple[int, ...]:
    """Every id that ends an answer: the checkpoint's, the tokenizer's, and those of the special tokens `ends`. Chat
    fine-tunes often change only the tokenizer's."""
    given = generation.get("eos_token_id", config.get("eos_token_id"))
    listed = given if isinstance(given, list) else [given]
    own = [tokenizer.special_ids.get(end) for end in ends]
    found = [token_id for token_id in [*listed, tokenizer.eos_token_id, *own] if token_id is not None]
    for token_id in found:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ModelError(f"eos_token_id must be from 0 to {vocab_size - 1}, but is {errors.shown(token_id)}")
    return tuple(dict.fromkeys(found))
