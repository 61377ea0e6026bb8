"""The requests that load and unload LoRA adapters, in the form of vLLM's."""

from __future__ import annotations

from inferd.server.schema.request_model import RequestModel, option, required
from inferd.server.schema.values import Text


class LoadAdapterRequest(RequestModel):
    """An adapter on the server's disk."""

    lora_name: Text = required("The name that requests send as `model`.")
    lora_path: Text = required("The directory of the adapter, in PEFT's format, on the server.")
    base_model_name: Text | None = option("The model that the adapter is for. Needed if the server has several.")


class UnloadAdapterRequest(RequestModel):
    """The name of a loaded adapter."""

    lora_name: Text = required("The name of the adapter.")
