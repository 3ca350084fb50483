"""The models of transformers that a small configuration can be made for, trained by each system.

The reference is torch.optim.SGD in one process. Users of LOMO expect it to be independent of the
model (https://github.com/OpenLMLab/LOMO/issues/73). Models that plain torch cannot train here are
skipped, with the reason in the test's output.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringcomm.optim import Lomo

pytestmark = pytest.mark.slow

LR = 0.01
NUM_STEPS = 3
MAX_PARAMS = 3_000_000
VOCAB = 64
IDS = [torch.randint(4, VOCAB, (2, 12), generator=torch.Generator().manual_seed(i)) for i in (1, 2)]

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
    (("pad_token_id",), 0),
    (("bos_token_id", "decoder_start_token_id"), 1),
    (("eos_token_id",), 2),
)
SIZE_OF = {name: size for names, size in SIZES for name in names}
# A skip of one of these is a failure.
KNOWN = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": (
        "bloom falcon gemma2 gpt2 gpt_neox gptj llama mamba mistral mixtral mpt olmo2 opt phi qwen2"
        " qwen2_moe qwen3 stablelm"
    ),
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "albert bert deberta-v2 distilbert electra esm roberta",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "bart marian mbart mt5 pegasus t5",
}


@contextlib.contextmanager
def sgd(model: nn.Module) -> Iterator[Any]:
    """The reference."""
    yield torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR)


@contextlib.contextmanager
def lomo(model: nn.Module) -> Iterator[Any]:
    """Layers are fused, weights are updated in the backward pass."""
    yield Lomo(model, LR)


@contextlib.contextmanager
def lomo_deferred(model: nn.Module) -> Iterator[Any]:
    """Gradients wait for the norm."""
    yield Lomo(model, LR, clip_grad_norm=1e9)


System = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]


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


def train(system: System, model: nn.Module) -> dict[str, Tensor]:
    """The weights after some steps."""
    with system(model) as optimizer:
        for step in range(NUM_STEPS):
            torch.manual_seed(step)  # for dropout
            ids = IDS[step % len(IDS)]
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def compare(system: System, family: str, kind: str) -> tuple[str, str]:
    """(why it was skipped, what is wrong), both empty if the system trains as the reference."""
    try:
        model = build(family, kind)
        first = {name: param.detach().clone() for name, param in model.named_parameters()}
        wanted = train(sgd, model)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}", ""
    change = distance(wanted, first)
    if not 0 < change < math.inf:
        return f"weights move by {change}", ""
    try:
        gap = distance(train(system, build(family, kind)), wanted) / change
    except Exception as error:
        return "", f"{type(error).__name__}: {str(error)[:200]}"
    if gap < 1e-4:
        return "", ""
    noise = distance(train(sgd, build(family, kind)), wanted) / change
    if noise > 1e-6:
        return f"two runs of SGD differ by {noise:.1e} of the change", ""
    return "", f"weights differ by {gap:.1e} of the change"


def distance(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The norm of the difference of all weights."""
    return math.sqrt(sum(float((some[n] - others[n]).double().square().sum()) for n in others))


@pytest.mark.parametrize("system", [lomo, lomo_deferred])
@pytest.mark.parametrize("family", KNOWN)
def test_models_train_as_with_sgd(family: str, system: System) -> None:
    """Weights after three steps are those of torch.optim.SGD, for all models of a family."""
    modeling_auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    skipped, wrong, right = {}, {}, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in getattr(modeling_auto, family):
            reason, error = compare(system, family, kind)
            if reason:
                skipped[kind] = reason
            elif error:
                wrong[kind] = error
            else:
                right.append(kind)
            print(f"{kind}: {error or reason or 'right'}", flush=True)
    assert not wrong
    assert not skipped.keys() & set(KNOWN[family].split())
