"""Computes the expected scores with transformers, for the embedded model in float32.

Reads [[context, continuation], ...] from stdin. Writes [[sum of the continuation's log probabilities, whether it is the
greedy continuation], ...] to stdout. Runs in an environment that has transformers.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inferd.engine.api.checkpoint import EMBEDDED_PATH

tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_PATH)
model = AutoModelForCausalLM.from_pretrained(EMBEDDED_PATH, dtype=torch.float32).eval()
scores = []
for context, continuation in json.load(sys.stdin):
    context_ids = tokenizer.encode(context, add_special_tokens=False)
    ids = tokenizer.encode(context + continuation, add_special_tokens=False)
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    own = range(len(context_ids), len(ids))
    total = sum(float(logprobs[i - 1, ids[i]]) for i in own)
    scores.append([total, all(int(logprobs[i - 1].argmax()) == ids[i] for i in own)])
json.dump(scores, sys.stdout)
