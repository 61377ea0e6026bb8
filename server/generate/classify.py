"""Classes of texts and pairs, by a model with a classifier. Checks a request, and sends it through the router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from inferd.engine.api.classifier_folder import Activation
from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.messages import Ready
from inferd.engine.api.wire.params import Adapter, Pooling, SamplingParams
from inferd.server.dispatch.router import Router
from inferd.server.errors import messages as errors
from inferd.server.generate import work
from inferd.server.generate.inputs import results_of, vector_of
from inferd.server.generate.prompts import PromptReader
from inferd.server.generate.request import Caller
from inferd.server.generate.score import activated, activation_of, numbers
from inferd.server.generate.texts import Form, Inputs, Item, TextReader, cut_of
from inferd.server.schema.scores import JudgingFields
from inferd.server.text.model import ServedModel


@dataclass(frozen=True, slots=True)
class Classifying:
    """A valid request for classes. Only the intake makes one."""

    inputs: Inputs
    activation: Activation

    async def logits(self, router: Router) -> tuple[bytes, ...]:
        """The logits of each input in order. Raises `RequestError` and `EngineDeadError`."""
        return await results_of(router, self.inputs, vector_of)

    def classes(self, logits: Sequence[bytes]) -> Iterator[tuple[float, ...]]:
        """A number for each label, for each input in order. They are made one by one: all together may be millions."""
        return (activated(numbers(each), self.activation) for each in logits)


class ClassifyIntake:
    """The only maker of a valid request for classes."""

    def __init__(self, prompts: PromptReader, model: ServedModel) -> None:
        self._model, self._reader = model, TextReader(prompts, model)
        self._label_bytes = cache(model.judges.label_bytes)

    async def take(
        self,
        items: Sequence[Item],
        param: str,
        body: JudgingFields,
        caller: Caller,
        ready: Ready,
        adapter: Adapter | None,
        *,
        add_special: bool = True,
        names_all: bool = False,
    ) -> Classifying:
        """`param`: the field with the items. `ready`: what the engine said of the model. `names_all`: whether the
        answer has the names of all labels for each item. Raises `RequestError`."""
        model, judges = self._model, self._model.judges
        if not ready.num_labels:
            name = errors.clip(model.names[0], errors.MAX_ECHO)
            message = f"The model '{name}' has no classifier. Serve one with a head for sequence classification."
            raise RequestError("invalid_value", message, "model")
        activation = activation_of(judges, ready.num_labels, body)
        work.check_vectors(param, len(items), ready.num_labels, "labels")
        if names_all:
            work.check_labels(param, len(items), self._label_bytes(ready.num_labels))
        names = [param] if len(items) == 1 else [f"{param}[{i}]" for i in range(len(items))]
        cut = cut_of(body, model.max_model_len, judges.max_tokens)
        params = SamplingParams(max_tokens=0, seed=0, pooling=Pooling(gives="logits"), adapter=adapter)
        inputs = Inputs(
            inputs=await self._reader.read(
                items, names, cut, Form.of(model), add_special=add_special, first_name=param
            ),
            params=params,
            scheduling=caller.scheduling(body),
            account=caller.account,
        )
        return Classifying(inputs, activation)
