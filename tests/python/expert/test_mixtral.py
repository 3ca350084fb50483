"""A Mixtral of transformers whose experts ranks share: the loss and gradients of the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

from ringcomm.integrations.transformers import expert_parallelize
from ringcomm.nn import MixtureOfExperts
from ringcomm.parallel import expert

transformers = pytest.importorskip("transformers", minversion="5.0")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
}


def make_model(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**{**SIZES, **options})
    return transformers.MixtralForCausalLM(config)


def loss_of(model: Any, rank: int) -> Tensor:
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(rank))
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def check_model(rank: int, top_k: int) -> None:
    torch.set_num_threads(1)
    world_size = dist.get_world_size()
    whole = make_model(num_experts_per_tok=top_k)
    losses = [loss_of(whole, r) for r in range(world_size)]
    (torch.stack(losses).sum() / world_size).backward()
    model = expert_parallelize(make_model(num_experts_per_tok=top_k))
    loss = loss_of(model, rank)
    assert float(loss.detach()) == pytest.approx(float(losses[rank].detach()), abs=1e-5)
    loss.backward()
    expert.average_gradients(model)
    for (name, layer), block in zip(
        ((n, m) for n, m in model.named_modules() if isinstance(m, MixtureOfExperts)),
        (m for m in whole.modules() if type(m).__name__ == "MixtralSparseMoeBlock"),
        strict=True,
    ):
        assert name.endswith(".mlp")
        if top_k > 1:  # the weight of one expert is always 1
            near(layer.router.weight.grad, block.gate.weight.grad)
        for idx, of_layer in layer.experts.items():
            for weight in ("gate_up_proj", "down_proj"):
                grads = block.experts.get_parameter(weight).grad
                near(of_layer.get_parameter(weight).grad, grads[int(idx)])
    near(model.lm_head.weight.grad, whole.lm_head.weight.grad)
    near(model.model.embed_tokens.weight.grad, whole.model.embed_tokens.weight.grad)


def near(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    assert expected.any()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 2])
def test_experts_of_mixtral(top_k: int) -> None:
    run_ranks(2, check_model, top_k)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Linear(2, 2), "Linear has no MixtralSparseMoeBlock"),
        (lambda: make_model(router_jitter_noise=0.1), "set it to 0"),
        (lambda: make_model(output_router_logits=True), "set it to False, and add load_balancing"),
    ],
)
def test_models_that_are_refused(model: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        expert_parallelize(model())
