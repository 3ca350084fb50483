"""Tensor-parallel decoding on CPUs: a small Llama writes text, one token at a time.

torchrun --nproc-per-node 2 examples/decode.py --tokens 64

Each of a layer's two sums over the ranks is one call that also adds the residual and computes the
next RMSNorm. The weights are random.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from common import run
from torch import Tensor, nn

from ringcomm import ops
from ringcomm.integrations.transformers import tensor_parallelize

# In place: this rank's part of a sum becomes the normalized result, and the residual its sum.
AddNorm = Callable[[Tensor, Tensor, Tensor, float], object]


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--tokens", type=int, default=64, help="to write")
    add("--hidden", type=int, default=512, help="hidden size, a multiple of 16")
    add("--layers", type=int, default=4)
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    return parser


def make_model(hidden: int, layers: int, dtype: torch.dtype) -> Any:
    """A small Llama of random parameters, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval()


class Decoder:
    """Greedy decoding by a LlamaForCausalLM, which it splits over the ranks in place."""

    def __init__(self, model: Any, add_norm: AddNorm = ops.all_reduce_add_rms_norm_) -> None:
        self._model = tensor_parallelize(model, gather_logits=True)
        self._add_norm = add_norm
        for layer in model.model.layers:  # their sums are part of add_norm
            layer.self_attn.o_proj = _without_sum(layer.self_attn.o_proj)
            layer.mlp.down_proj = _without_sum(layer.mlp.down_proj)

    def _next_token(self, ids: Tensor, cache: Any) -> Tensor:
        """The likeliest token after ids (1, tokens) and those that the cache has."""
        base = self._model.model
        residual = base.embed_tokens(ids)
        positions = cache.get_seq_length() + torch.arange(ids.shape[1]).unsqueeze(0)
        rotary = base.rotary_emb(residual, position_ids=positions)
        first, *norms = (*(layer.input_layernorm for layer in base.layers), base.norm)
        x = first(residual)
        for layer, next_norm in zip(base.layers, norms, strict=True):
            x, _ = layer.self_attn(
                x, position_embeddings=rotary, attention_mask=None, past_key_values=cache
            )
            norm = layer.post_attention_layernorm
            self._add_norm(x, residual, norm.weight, norm.variance_epsilon)
            x = layer.mlp(x)
            self._add_norm(x, residual, next_norm.weight, next_norm.variance_epsilon)
        return self._model.lm_head(x[:, -1:]).argmax(-1)

    def tokens(self, prompt: Tensor) -> Iterator[int]:
        """Yields the tokens that follow, without an end; prompt: int64 (1, tokens). Collective."""
        from transformers import DynamicCache

        cache, ids = DynamicCache(config=self._model.config), prompt
        while True:
            with torch.inference_mode():
                ids = self._next_token(ids, cache)
            yield int(ids)


def _without_sum(linear: Any) -> nn.Linear:
    """This rank's part of a row-parallel layer."""
    part = nn.Linear(1, 1, bias=False, device="meta")
    part.weight = linear.weight
    return part


def main(options: argparse.Namespace) -> list[int]:
    """Decodes; the tokens."""
    torch.set_num_threads(1)
    model = make_model(options.hidden, options.layers, getattr(torch, options.dtype))
    following = Decoder(model).tokens(torch.tensor([[*b"A tensor-parallel decoder"]]))
    written = [next(following)]  # the prompt's own pass is not timed
    begin = time.perf_counter()
    written += [next(following) for _ in range(options.tokens - 1)]
    per_second = (options.tokens - 1) / (time.perf_counter() - begin)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, written)
    assert all(theirs == written for theirs in everyone), "ranks wrote different tokens"
    if dist.get_rank() == 0:
        print(f"{per_second:.1f} tokens per second", flush=True)
    return written


if __name__ == "__main__":
    run(main, parser())
