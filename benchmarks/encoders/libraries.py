"""The libraries that compute encoders, each behind one function. Each runs in the Python that has it installed.

A factory takes a model's folder, the folder of its exported files (`export.py`) and a precision. It gives a function
from the token ids of texts to vectors (the mean of all tokens, normalised) or, of a model with a classifier, to logits.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Ids = Sequence[Sequence[int]]
Encode = Callable[[Ids], "np.ndarray[Any, Any]"]
NUM_THREADS = len(os.sched_getaffinity(0))


def has_classifier(folder: Path) -> bool:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return bool(config["architectures"][0].endswith("ForSequenceClassification"))


def padded(ids: Ids) -> tuple[Any, Any]:
    """(ids, mask), [texts, most tokens] int64 each."""
    length = max(map(len, ids))
    rows, mask = np.zeros((len(ids), length), np.int64), np.zeros((len(ids), length), np.int64)
    for row, own in enumerate(ids):
        rows[row, : len(own)], mask[row, : len(own)] = own, 1
    return rows, mask


def pooled(hidden: Any, mask: Any) -> Any:
    """The mean of each text's tokens, normalised; logits stay as they are."""
    if hidden.ndim == 2:
        return hidden
    total = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
    return total / np.linalg.norm(total, axis=1, keepdims=True)


def inferd(folder: Path, files: Path, precision: str) -> Encode:
    torch: Any = importlib.import_module("torch")
    native, library, checkpoint, registry, models, loader, devices, recording = (
        importlib.import_module(f"inferd.{name}")
        for name in (
            "kernels.cpu.native",
            "kernels.cpu.library",
            "engine.api.checkpoint",
            "engine.arch.encoder_registry",
            "engine.models.encoder",
            "engine.models.loader",
            "engine.worker.device",
            "engine.worker.recorded_encoder",
        )
    )
    reason = native.prepare(library.default_cache_dir()).reason
    assert not reason, reason
    torch.set_num_threads(NUM_THREADS)
    read = checkpoint.Checkpoint.read(folder)
    arch = registry.describe_encoder(read.config)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    quantization = precision if precision in ("int8", "int4") else "none"
    encoder = models.Encoder(arch, dtype, "cpu", recipe=loader.recipe_of(arch, quantization, dtype))
    loader.load(encoder, read.tensors_of(arch))
    recorded = recording.RecordedEncoder(encoder, devices.CpuDevice(NUM_THREADS))

    def encode(ids: Ids) -> Any:
        lengths = [len(own) for own in ids]
        tokens = torch.tensor([token for own in ids for token in own])
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        hidden = recorded.forward(tokens, starts)
        if arch.classifier is not None:
            return encoder.logits(hidden, starts).numpy()
        means = torch.segment_reduce(hidden.float(), "mean", lengths=torch.tensor(lengths))
        return torch.nn.functional.normalize(means).numpy()

    return encode


def sentence_transformers(folder: Path, files: Path, precision: str) -> Encode:
    """torch, without the library's tokenizer. int8 is torch's dynamic quantization of linear layers."""
    torch: Any = importlib.import_module("torch")
    library: Any = importlib.import_module("sentence_transformers")
    torch.set_num_threads(NUM_THREADS)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    is_classifier = has_classifier(folder)
    kind = library.CrossEncoder if is_classifier else library.SentenceTransformer
    model = kind(str(folder), device="cpu", model_kwargs={"dtype": dtype})
    own: Any = model.eval()
    if precision == "int8":
        own = torch.ao.quantization.quantize_dynamic(own, {torch.nn.Linear}, dtype=torch.qint8)

    def encode(ids: Ids) -> Any:
        rows, mask = (torch.from_numpy(array) for array in padded(ids))
        with torch.inference_mode():
            if is_classifier:
                return own(input_ids=rows, attention_mask=mask).logits.float().numpy()
            out = own({"input_ids": rows, "attention_mask": mask})["sentence_embedding"].float()
            return torch.nn.functional.normalize(out).numpy()

    return encode


def onnxruntime(folder: Path, files: Path, precision: str) -> Encode:
    """The graph that `export.py` made and fused, as fastembed runs it; int8 is quantized at each call."""
    library: Any = importlib.import_module("onnxruntime")
    options = library.SessionOptions()
    options.intra_op_num_threads = NUM_THREADS
    session = library.InferenceSession(
        str(files / ("fused.onnx" if precision == "fp32" else f"fused_{precision}.onnx")),
        options,
        providers=["CPUExecutionProvider"],
    )

    def encode(ids: Ids) -> Any:
        rows, mask = padded(ids)
        (out,) = session.run(None, {"input_ids": rows, "attention_mask": mask})
        return pooled(out, mask)

    return encode


def openvino(folder: Path, files: Path, precision: str) -> Encode:
    """int8: weights of 8 bits and activations quantized at the call. static: both by NNCF, calibrated."""
    library: Any = importlib.import_module("openvino")
    model = files / ("model.onnx" if precision in ("fp32", "bf16") else f"{precision}.xml")
    hint = "bf16" if precision == "bf16" else "f32"
    settings: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": NUM_THREADS,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": hint,
    }
    compiled = library.Core().compile_model(str(model), "CPU", settings)
    request = compiled.create_infer_request()

    def encode(ids: Ids) -> Any:
        rows, mask = padded(ids)
        return pooled(request.infer({"input_ids": rows, "attention_mask": mask})[0], mask)

    return encode


LIBRARIES: dict[str, Callable[[Path, Path, str], Encode]] = {
    "inferd": inferd,
    "sentence-transformers": sentence_transformers,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
}
