"""A Llama of a few thousand weights, made from a configuration, and a tokenizer for it."""

from __future__ import annotations

from typing import Any

import torch

WORDS = ("<pad>", "<s>", "</s>", "<unk>", *(f"w{idx}" for idx in range(60)))
VOCABULARY = len(WORDS)


def tiny_llama(head_dim: int = 8) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        head_dim=head_dim,
    )
    return LlamaForCausalLM(config)


def tokenizer() -> Any:
    """Splits text at spaces into WORDS."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    model = WordLevel({word: idx for idx, word in enumerate(WORDS)}, unk_token="<unk>")
    backend = Tokenizer(model)
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=64,
    )


def text(generator: torch.Generator, num_words: int) -> str:
    """Random words."""
    drawn = torch.randint(4, VOCABULARY, (num_words,), generator=generator)
    return " ".join(WORDS[int(idx)] for idx in drawn)
