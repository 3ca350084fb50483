"""Splits causal language models of transformers into blocks for ringcomm.parallel.pipeline."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm.integrations.transformers.tensor_parallel import refuse_embeddings
from ringcomm.parallel.tensor.layers import RowParallelLinear
from ringcomm.torch_names import shallow_copy


def pipeline_blocks(model: Any) -> dict[str, nn.Module]:
    """The modules of a causal language model by name, in the order in which a pipeline runs them.

    Each layer is called with hidden states, and perhaps with an attention_mask and position_ids as
    the model itself. It runs in the model's own forward, in which the other layers do nothing.
    Blocks therefore compute what the model computes, for every kind of layer.

    The model has a pipeline plan in its config; it may come from tensor_parallelize(), and is not
    in torch's wrappers. It is changed in place and can no longer be called itself. Raises TypeError
    for another one.
    """
    base: Any = getattr(model, "base_model", None)
    plan = getattr(getattr(base, "config", None), "base_model_pp_plan", None)
    if not plan:
        raise TypeError(
            f"{type(model).__name__} is not a model of transformers with a pipeline plan in its"
            " config; of a module around one, give the model itself"
        )
    head = model.get_output_embeddings()
    others = [name for name in plan if name != "layers"]
    blocks = {}
    for name in plan:
        if name != "layers":
            blocks[f"{model.base_model_prefix}.{name}"] = getattr(base, name)
            continue
        for idx, layer in enumerate(base.layers):
            blocks[f"{model.base_model_prefix}.layers.{idx}"] = layer
            layer.forward = _alone(base, others, layer, idx)
    head_name = next(name for name, module in model.named_modules() if module is head)
    head.forward = _output(model, head_name, head.forward)
    return {**blocks, head_name: head}


def problem_of_blocks(model: Any) -> str:
    """Why the blocks of a model, one after the other, do not compute what it computes, or "".

    Compares the logits of a few tokens, without dropout. The model stays as it is.
    """
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    found = ids = torch.arange(4, device=next(model.parameters()).device)[None]
    wanted, problem = None, "its blocks give other logits"
    try:
        with torch.no_grad():
            with suppress(Exception):  # it needs more than ids, or values on the meta device
                wanted = model.eval()(input_ids=ids, use_cache=False).logits
            for block in pipeline_blocks(model).values():
                found = found if wanted is None else block(found)
        if wanted is None or wanted.is_meta or (found - wanted).norm() <= 0.01 * wanted.norm():
            problem = ""
    except Exception as error:  # of layers that get other arguments than in their model
        problem = f"{type(error).__name__}: {error}"
    finally:
        for now, values in before:
            now.clear()
            now.update(values)
    return problem


class _Call(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def _alone(base: Any, others: list[str], layer: Any, idx: int) -> Callable[..., Tensor]:
    """The forward of a layer as the idx-th of its model, whose other modules do nothing."""
    run, num_layers = layer.forward, len(base.layers)

    def forward(
        hidden: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        layers = nn.ModuleList(
            _Call((lambda _, **more: run(hidden, **more)) if other == idx else (lambda x, **_: x))
            for other in range(num_layers)
        )
        shell = _shell_of(base, {**dict.fromkeys(others, nn.Identity()), "layers": layers})
        # Masks and positions are those of all tokens; a rank may have only some of the tokens.
        rows, num_tokens, width = hidden.shape
        tokens = hidden.new_empty(()).expand(rows, num_tokens * _sequence_ranks(layer), width)
        found: Tensor = shell(
            inputs_embeds=tokens,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).last_hidden_state
        return found

    return forward


def _output(model: Any, head_name: str, run: Callable[[Tensor], Tensor]) -> Any:
    """The forward of the output layer and the model's own post-processing of logits."""

    def forward(hidden: Tensor) -> Tensor:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        made = MoeModelOutputWithPast(last_hidden_state=hidden)
        base = _Call(lambda *_, **__: made)
        shell = _shell_of(model, {model.base_model_prefix: base, head_name: _Call(run)})
        return shell().logits

    return forward


def _shell_of(module: Any, replaced: dict[str, nn.Module]) -> Any:
    """A shallow copy with the same parameters and submodules, some of which are replaced."""
    return shallow_copy(module, replaced, lambda hook: hook is not refuse_embeddings)


def _sequence_ranks(layer: nn.Module) -> int:
    """How many ranks share the tokens of a layer's input."""
    for module in layer.modules():
        if isinstance(module, RowParallelLinear) and module.sequence_dim is not None:
            return module.group.size()
    return 1
