"""Writes what the libraries need besides a model's own folder: run each part in the Python that has its library.

    PYTHONPATH=. python -m benchmarks.encoders.export onnx FOLDER FILES      # torch, transformers, onnx, onnxruntime
    PYTHONPATH=. python -m benchmarks.encoders.export openvino FOLDER FILES  # openvino, nncf; needs model.onnx
    PYTHONPATH=. python -m benchmarks.encoders.export random NAME FOLDER TOKENIZER_OF  # transformers

`onnx` writes model.onnx, fused.onnx (ONNX Runtime's fusions) and fused_int8.onnx. `openvino` writes int8.xml (weights
of 8 bits) and static.xml (activations too, calibrated).
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.encoders.libraries import has_classifier, padded
from benchmarks.encoders.worker import ids_of

_CALIBRATION_TEXTS = 100
_INPUTS = ("input_ids", "attention_mask")

SHAPES: dict[str, dict[str, Any]] = {
    "e5-small": {
        "vocab_size": 30522, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12,
        "num_attention_heads": 12, "max_position_embeddings": 512,
    },
    "bge-reranker-v2-m3": {
        "vocab_size": 250002, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "max_position_embeddings": 8194, "type_vocab_size": 1, "pad_token_id": 1,
        "num_labels": 1,
    },
}  # fmt: skip
"""Published shapes, for random weights. The first is a BERT, the second an XLM-RoBERTa with a classifier."""


def write_random(name: str, folder: Path, tokenizer_of: Path) -> None:
    """A checkpoint with random weights and the tokenizer of another."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(1)
    family = "Bert" if name == "e5-small" else "XLMRoberta"
    kind = "BertModel" if name == "e5-small" else "XLMRobertaForSequenceClassification"
    model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**SHAPES[name]))
    model.save_pretrained(folder)
    if family == "Bert":
        for own in tokenizer_of.rglob("*.json"):
            if own.name != "config.json" or own.parent != tokenizer_of:
                goal = folder / own.relative_to(tokenizer_of)
                goal.parent.mkdir(exist_ok=True)
                shutil.copy(own, goal)
        shutil.copy(tokenizer_of / "vocab.txt", folder)


def write_onnx(folder: Path, files: Path) -> None:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    kind = "AutoModelForSequenceClassification" if has_classifier(folder) else "AutoModel"
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    class Traced(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model.eval()

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]

    rows, mask = (torch.from_numpy(array) for array in padded(ids_of([9, 9], 1)))
    axes = {name: {0: "batch", 1: "length"} for name in _INPUTS}
    torch.onnx.export(
        Traced(), (rows, mask), str(files / "model.onnx"), input_names=list(_INPUTS), output_names=["out"],
        dynamic_axes=axes | {"out": {0: "batch"} if has_classifier(folder) else {0: "batch", 1: "length"}},
        opset_version=18, dynamo=False,
    )  # fmt: skip
    _fuse(json.loads((folder / "config.json").read_text()), files)


def _fuse(config: dict[str, Any], files: Path) -> None:
    optimizer: Any = importlib.import_module("onnxruntime.transformers.optimizer")
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    is_large = config["hidden_size"] >= 1024  # a file of protobuf has at most 2 GB
    fused = optimizer.optimize_model(
        str(files / "model.onnx"), model_type="bert", num_heads=config["num_attention_heads"],
        hidden_size=config["hidden_size"], opt_level=1, use_gpu=False,
    )  # fmt: skip
    print(fused.get_fused_operator_statistics())
    fused.save_model_to_file(str(files / "fused.onnx"), use_external_data_format=is_large)
    quantization.quantize_dynamic(
        str(files / "fused.onnx"), str(files / "fused_int8.onnx"), weight_type=quantization.QuantType.QInt8,
        per_channel=True, use_external_data_format=is_large, extra_options={"DefaultTensorType": 1},
    )  # fmt: skip


def write_openvino(files: Path) -> None:
    openvino, nncf = importlib.import_module("openvino"), importlib.import_module("nncf")
    core: Any = openvino.Core()
    narrowed = nncf.compress_weights(core.read_model(files / "model.onnx"), mode=nncf.CompressWeightsMode.INT8_SYM)
    openvino.save_model(narrowed, files / "int8.xml", compress_to_fp16=False)
    lengths = [int(length) for length in np.random.default_rng(1).integers(8, 128, _CALIBRATION_TEXTS)]
    texts = [dict(zip(_INPUTS, padded([own]), strict=True)) for own in ids_of(lengths, 2)]
    static = nncf.quantize(
        core.read_model(files / "model.onnx"), nncf.Dataset(texts), model_type=nncf.ModelType.TRANSFORMER,
        subset_size=_CALIBRATION_TEXTS,
    )  # fmt: skip
    openvino.save_model(static, files / "static.xml", compress_to_fp16=False)


def main() -> None:
    part, first, second = sys.argv[1:4]
    Path(second).mkdir(parents=True, exist_ok=True)
    if part == "onnx":
        write_onnx(Path(first), Path(second))
    elif part == "openvino":
        write_openvino(Path(second))
    else:
        write_random(first, Path(second), Path(sys.argv[4]))


if __name__ == "__main__":
    main()
