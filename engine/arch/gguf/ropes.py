"""The fields of config.json that describe rotary embedding, from the metadata of a GGUF file."""

from __future__ import annotations

from inferd.engine.arch.gguf.header import GgufError
from inferd.engine.arch.gguf.metadata import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    Config,
    Metadata,
)


def rope_scaling(of: Metadata) -> Config | None:
    kind = of.get("rope.scaling.type", "linear" if of.get("rope.scaling.factor") else "none")
    factor = of.get("rope.scaling.factor", 1.0)
    original = of.get("rope.scaling.original_context_length", of.required("context_length"))
    if of.factors:
        if kind not in ("none", "longrope") and factor != 1.0:
            raise of.refuse("rope.scaling.type", f"must be none beside the tensor {next(iter(of.factors))}")
        return _scaling_by_factors(of, original)
    match kind:
        case "none" | "longrope":
            return None
        case "linear":
            return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        case "yarn":
            names = {
                "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor",
                "mscale_all_dim": "yarn_log_multiplier",
            }  # fmt: skip
            optional = {name: of.get(f"rope.scaling.{key}") for name, key in names.items()}
            # 0 stands for none.
            optional["mscale_all_dim"] = optional["mscale_all_dim"] or None
            optional["mscale"] = None if optional["mscale_all_dim"] is None else 1.0
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                **{name: value for name, value in optional.items() if value is not None},
            }
        case _:
            raise of.refuse("rope.scaling.type", "must be none, linear, yarn or longrope")


def _scaling_by_factors(of: Metadata, original: int) -> Config:
    """Factors of Llama 3, which hold for every length, or LongRoPE's two lists."""
    both = of.factors.get(ROPE_FACTORS)
    short, long = of.factors.get(SHORT_FACTORS, both), of.factors.get(LONG_FACTORS, both)
    if short is None or long is None:
        raise GgufError(f"the file must have both {SHORT_FACTORS} and {LONG_FACTORS}, or {ROPE_FACTORS}")
    config: Config = {
        "rope_type": "longrope",
        "short_factor": list(short),
        "long_factor": list(long),
        "original_max_position_embeddings": original,
        "attention_factor": 1.0 if both is not None else of.get("rope.scaling.attn_factor"),
    }
    return {name: value for name, value in config.items() if value is not None}
