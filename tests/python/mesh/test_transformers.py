"""Causal language models of transformers with ringcomm's loss: the same loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_weights
from ranks import in_ranks
from steps import train_step
from torch import Tensor, nn

from ringcomm.integrations.transformers import expert_parallelize, patch_loss
from ringcomm.integrations.transformers.pipeline import problem_of_blocks
from ringcomm.integrations.transformers.training import causal_lm_loss
from ringcomm.optim import Lomo

transformers = pytest.importorskip("transformers")
assert transformers.Qwen3MoeForCausalLM  # imported before ranks are forked

SIZES = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {"llama": "LlamaConfig", "gpt2": "GPT2Config"}


def make_model(kind: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS[kind])(**SIZES)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def step(model: Any, **arguments: Any) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients."""
    ids = torch.randint(0, 131, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    loss = model(input_ids=ids, labels=labels, **arguments).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("kind", "dtype", "inplace", "num_items"),
    [
        ("llama", torch.float32, False, None),
        ("llama", torch.bfloat16, True, torch.tensor(7)),
        ("gpt2", torch.float32, True, 7),  # whose loss has no type
    ],
)
def test_the_loss_and_its_gradients_stay(
    kind: str, dtype: torch.dtype, inplace: bool, num_items: Any
) -> None:
    arguments = {} if num_items is None else {"num_items_in_batch": num_items}
    loss, grads = step(make_model(kind, dtype), **arguments)
    model = make_model(kind, dtype)
    assert patch_loss(patch_loss(model), inplace=inplace) is model
    ours, our_grads = step(model, **arguments)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-6)
    # Of bfloat16 the gradients of logits are rounded once in either way, at other places.
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    assert len(grads) == len(our_grads)
    for grad, our_grad in zip(grads, our_grads, strict=True):
        torch.testing.assert_close(our_grad, grad, rtol=limit, atol=limit * float(grad.abs().max()))


def test_labels_that_are_shifted_already() -> None:
    logits, labels = torch.randn(2, 5, 11), torch.randint(0, 11, (2, 5))
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    expected = causal_lm_loss(logits, labels, 11)
    torch.testing.assert_close(causal_lm_loss(logits, None, 11, shift_labels=shifted), expected)
    with pytest.raises(ValueError, match="labels or shift_labels"):
        causal_lm_loss(logits, None, 11)


def test_evaluation_keeps_the_logits() -> None:
    model = make_model("llama", torch.float32)
    ids = torch.randint(0, 131, (2, 9))
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids)
        found = patch_loss(model, inplace=True)(input_ids=ids, labels=ids)
    in_training = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(in_training.logits, expected.logits)
    in_training.loss.backward()
    assert not torch.equal(in_training.logits, expected.logits)
    with pytest.raises(ValueError, match='inplace must be False, True or "forward"'):
        patch_loss(model, inplace="backward")  # type: ignore[arg-type]
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


def test_other_models_are_refused() -> None:
    with pytest.raises(TypeError, match="Linear has no loss_function"):
        patch_loss(nn.Linear(2, 2))
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(ValueError, match="must have the loss ForCausalLMLoss"):
        patch_loss(model)


def test_experts_that_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no stacked experts"):
        expert_parallelize(nn.Linear(2, 2))
    # Interleaved, transposed, and with biases.
    options = {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": None}
    config = transformers.GptOssConfig(**SIZES, **options)
    with pytest.raises(ValueError, match="GptOssForCausalLM has no stacked experts"):
        expert_parallelize(transformers.GptOssForCausalLM(config))


def qwen() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    config = transformers.Qwen3MoeConfig(**sizes, **heads, **experts, norm_topk_prob=False)
    return transformers.Qwen3MoeForCausalLM(config)


def train_qwen(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Of one process the mean over the rows."""
    model = qwen()
    if world_size > 1:
        expert_parallelize(model)
    for name, param in model.named_parameters():
        param.requires_grad_(options.get("frozen", "-") not in name)
    if options.get("recomputes"):
        enable = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        next(getattr(model, name) for name in enable if hasattr(model, name))()
    params = [param for param in model.parameters() if param.requires_grad]
    group = dist.group.WORLD
    opt: Any = Lomo(model, 0.2, group=group) if world_size > 1 else torch.optim.SGD(params, 0.2)
    for step in range(3):
        ids = torch.randint(31, (4, 6), generator=torch.Generator().manual_seed(step))
        own = ids.chunk(world_size)[rank]
        train_step(model(input_ids=own, labels=own, use_cache=False).loss, opt)
    return full_weights(model)


@in_ranks(2)
def test_ranks_that_generate_different_numbers_of_tokens(rank: int) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/2470: ranks without work wait for experts."""
    given = {"max_new_tokens": 2 + 3 * rank, "do_sample": False, "pad_token_id": 0}
    ids = torch.randint(31, (3, 12), generator=torch.Generator().manual_seed(rank))
    found = expert_parallelize(qwen()).eval().generate(ids, synced_gpus=True, **given)
    assert torch.equal(found, qwen().eval().generate(ids, **given))


@pytest.mark.parametrize(
    "options",
    [{"recomputes": True}, {"frozen": ".gate."}, {"frozen": ".experts."}],
    ids=lambda options: "-".join(map(str, options.values())),
)
@in_ranks(2)
def test_a_model_of_transformers(rank: int, options: dict[str, Any]) -> None:
    """With the router or the experts frozen: https://github.com/huggingface/transformers/48687."""
    found, expected = train_qwen(rank, 2, options), train_qwen(0, 1, options)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_models_that_are_no_chain_of_blocks_are_refused() -> None:
    """The blocks are asked for logits, and the model stays as it was."""
    model = make_model("llama", torch.float32).train()
    before = [(name, *vars(module)) for name, module in model.named_modules()]
    assert problem_of_blocks(model) == ""
    assert model.training
    assert before == [(name, *vars(module)) for name, module in model.named_modules()]

    def change(_: nn.Module, args: Any, output: Any) -> None:
        output.last_hidden_state = output.last_hidden_state + 1

    model.model.register_forward_hook(change)  # no block does that
    assert "other logits" in problem_of_blocks(model)
