"""Small models of transformers: every kind that a small configuration can be made for."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

MAX_PARAMS = 3_000_000
VOCAB = 64

# Sizes in configurations, by the words in their names; the first that applies.
SIZES = (
    (("vocab_size", "vocabulary_size"), VOCAB),
    (("num_key_value_heads", "num_kv_heads", "multi_query_num"), 2),
    (("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"), 2),
    (("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    (("head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"), 8),
    (("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), 2),
    (("decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    (("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    (("encoder_attention_heads", "decoder_attention_heads"), 4),
    (("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"), 32),
    (("word_embed_proj_dim", "attention_hidden_size", "hidden_dim", "lru_width"), 32),
    (("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    (("dff", "d_inner", "ffn_hidden_size", "shared_expert_intermediate_size"), 48),
    (("moe_intermediate_size", "expert_ffn_hidden_size", "q_lora_rank", "kv_lora_rank"), 16),
    (("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    (("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 64),
    (("attention_types",), [[["global", "local"], 1]]),
    (("mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim", "mamba_chunk_size"), 8),
    (("mamba_d_state", "ssm_state_size", "chunk_size", "linear_key_head_dim"), 8),
    (("linear_value_head_dim",), 8),
    (("mamba_d_ssm",), 64),
    (("linear_num_key_heads", "mamba_expand"), 2),
    (("linear_num_value_heads", "attention_window"), 4),
    (("pad_token_id",), 0),
    (("bos_token_id", "decoder_start_token_id"), 1),
    (("eos_token_id",), 2),
)
SIZE_OF = {name: size for names, size in SIZES for name in names}
# A skip of one of these is a failure.
KNOWN = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": (
        "bloom deepseek_v3 falcon gemma2 gpt2 gpt_neox gptj llama mamba mistral mixtral mpt olmo2"
        " opt phi qwen2 qwen2_moe qwen3 qwen3_moe stablelm"
    ),
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "albert bert deberta-v2 distilbert electra esm roberta",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "bart marian mbart mt5 pegasus t5",
}


def sizes_of(config: Any) -> dict[str, Any]:
    """The arguments that make a small configuration, and small ones in it."""
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            found[name] = {"model_type": value.model_type, **sizes_of(value)}
        elif name in SIZE_OF and isinstance(value, list) == isinstance(SIZE_OF[name], list):
            found[name] = SIZE_OF[name]
    if "kv_lora_rank" in found:  # latent attention repeats no heads
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found


def build(family: str, kind: str) -> nn.Module:
    """The same weights for each call; raises if there is no small model of that kind."""
    import transformers
    from transformers.models.auto import modeling_auto

    config_class = type(transformers.AutoConfig.for_model(kind))
    config = config_class(**sizes_of(config_class()))
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 1
    model_class = getattr(transformers, getattr(modeling_auto, family)[kind])
    config._attn_implementation, config.use_cache = "eager", False
    with torch.device("meta"):
        num_params = sum(param.numel() for param in model_class(config).parameters())
    if num_params > MAX_PARAMS:
        raise ValueError(f"{num_params} parameters in the smallest configuration")
    torch.manual_seed(0)
    model: nn.Module = model_class(config).float().train()
    return model


def drop_nothing(model: nn.Module) -> nn.Module:
    """Without dropout, skipped layers and noise, whose random numbers depend on the rows."""
    for part in model.modules():
        for owner in (part, getattr(part, "config", None)):
            for name, value in vars(owner).items() if owner is not None else ():
                is_rate = name == "p" or "drop" in name or "jitter" in name
                if is_rate and isinstance(value, float):
                    setattr(owner, name, 0.0)
    return model


def distance(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The norm of the difference of all weights."""
    return math.sqrt(sum(float((some[n] - others[n]).double().square().sum()) for n in others))


def gaps(
    found: dict[str, Tensor], wanted: dict[str, Tensor], first: dict[str, Tensor]
) -> dict[str, float]:
    """How far each weight is from the wanted one, in units of its change from the first one.

    A change below a ten-thousandth of that of all weights is rounding.
    """
    least = 1e-4 * distance(wanted, first)
    return {
        name: distance({name: found[name]}, {name: value})
        / (distance({name: value}, {name: first[name]}) + least)
        for name, value in wanted.items()
    }
