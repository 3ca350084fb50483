"""Tensor parallelism for models of transformers, by the plan that comes with each of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.backend import resolve_group
from ringcomm.integrations.transformers import causal_lm_loss, loss_options_of
from ringcomm.nn import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from ringcomm.parallel.tensor.heads import HeadShares, share_heads
from ringcomm.parallel.tensor.regions import enter, leave, sum_gradients
from ringcomm.parallel.tensor.splits import SplitModule

__all__ = ["parallelize"]

COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"


def parallelize(
    model: Any,
    group: dist.ProcessGroup | None = None,
    *,
    sequence_parallel: bool = False,
    gather_logits: bool = False,
) -> Any:
    """Splits a causal language model over the ranks of a group (Shoeybi et al. 2019).

        model = parallelize(AutoModelForCausalLM.from_pretrained(...), group)
        model(input_ids=ids, labels=ids).loss.backward()  # the same rows on all ranks

    Attention is split by heads, the rest by features, embedding and output by vocabulary. A layer
    has two all_reduces of its activations forward and two backward.

    Args:
        model: of transformers, with a plan in its config (Llama, Mistral, Qwen, ...): whole, the
            same on all ranks, and changed in place. The parameters of its layers may be on the meta
            device, for ringcomm.parallel.tensor.load_full_state_dict. Make optimizers after it.
        group: None for the default group.
        sequence_parallel: have the ranks share the tokens between split layers (Korthikanti et al.
            2022): the same bytes, and 1/N of those activations. Wants input_ids, of a length that
            the ranks divide.
        gather_logits: whether logits are whole on all ranks, as generate() wants. Without it they
            are this rank's classes, and the loss is computed over all of them in one collective.

    Returns:
        `model`.

    Raises:
        TypeError: the model has no plan.
        ValueError: it is split already, has layers that the plan knows another way to split, or
            heads that the ranks cannot share. Nothing has been changed.

    Collective where key and value heads are copied, since there are fewer than ranks.
    """
    resolved = resolve_group(group)
    base = getattr(model, "base_model", None)
    plan = getattr(getattr(base, "config", None), "base_model_tp_plan", None)
    if base is None or not plan:
        raise TypeError(f"the config of {type(model).__name__} has no plan for tensor parallelism")
    if any(isinstance(module, SplitModule) for module in model.modules()):
        raise ValueError("the model is split already")
    head = model.get_output_embeddings() if base is not model else None
    if sequence_parallel and head is None:
        raise ValueError("sequence_parallel wants a model with an output layer over a vocabulary")
    blocks = _Blocks(base, plan)
    heads = {
        block: _heads_of(block, resolved.size()) for block in blocks.columns if _attends(block)
    }
    loss_options = loss_options_of(model) if head is not None and not gather_logits else None
    splitter = _Splitter(resolved, 1 if sequence_parallel else None)
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    for block in blocks.columns:
        splitter.split_block(blocks, block, heads.get(block))
    embedding = VocabParallelEmbedding.from_embedding(
        model.get_input_embeddings(), group=resolved, leaves=not sequence_parallel
    )
    model.set_input_embeddings(embedding)
    for module in blocks.summed:
        splitter.sum_over_ranks(module)
    if sequence_parallel:
        splitter.share_tokens(base, blocks.summed)
    if head is not None:
        # Behind the last norm the tokens are whole again, so that the head may take some of them.
        made = ColumnParallelLinear.from_linear(
            head, group=resolved, enters=not sequence_parallel, gathers=gather_logits
        )
        if is_tied:
            made.weight = embedding.weight
        model.set_output_embeddings(made)
        if loss_options is not None:
            model.loss_function = partial(
                causal_lm_loss, group=resolved, vocab_start=made.features[0], **loss_options
            )
    return model


class _Blocks:
    """The layers of a model by what its plan says of them, and what they are children of.

    Attributes:
        columns: for each module around layers that share its input: their names in it.
        rows: for each such module the layers behind.
        summed: modules that all ranks have, on activations that differ.
    """

    def __init__(self, base: nn.Module, plan: Mapping[str, str]) -> None:
        self.columns: dict[nn.Module, list[str]] = {}
        self.rows: dict[nn.Module, list[str]] = {}
        self.summed: list[nn.Module] = []
        patterns = [
            (re.compile(re.escape(name).replace(r"\*", r"[^.]+")), style)
            for name, style in plan.items()
        ]
        for name, module in base.named_modules():
            style = next((s for pattern, s in patterns if pattern.fullmatch(name)), None)
            if style == SUMMED:
                self.summed.append(module)
            elif style in (COLUMNS, ROWS) and isinstance(module, nn.Linear):
                parent, _, leaf = name.rpartition(".")
                kind = self.columns if style == COLUMNS else self.rows
                kind.setdefault(base.get_submodule(parent), []).append(leaf)
            elif style is not None:
                raise ValueError(
                    f"{name}, a {type(module).__name__}, is {style} in the model's plan, which is"
                    " not supported"
                )
        for block in self.columns:
            self._check(block)

    def _check(self, block: nn.Module) -> None:
        """All that has weights in a block is in the plan: its input enters once for all."""
        known = {*self.columns[block], *self.rows.get(block, ())}
        for name, module in block.named_children():
            if name not in known and module not in self.summed and [*module.parameters()]:
                raise ValueError(f"{name} of a {type(block).__name__} is not in the model's plan")
        if block not in self.rows:
            raise ValueError(f"the plan splits a {type(block).__name__} that no row layer joins")


def _attends(block: nn.Module) -> bool:
    return hasattr(block, "num_key_value_groups")


def _heads_of(block: Any, world_size: int) -> HeadShares:
    width = block.head_dim
    return share_heads(
        block.q_proj.out_features // width, block.k_proj.out_features // width, world_size
    )


class _Splitter:
    def __init__(self, group: dist.ProcessGroup, sequence_dim: int | None) -> None:
        self.group, self.sequence_dim = group, sequence_dim

    def split_block(self, blocks: _Blocks, block: Any, heads: HeadShares | None) -> None:
        """An attention or a feed-forward network."""
        width = 1 if heads is None else block.head_dim
        num_together, num_copies = heads or (1, 1)
        for name in blocks.columns[block]:
            is_shared = heads is not None and name != "q_proj"
            made = ColumnParallelLinear.from_linear(
                getattr(block, name),
                group=self.group,
                unit=width if is_shared else num_together * width,
                num_copies=num_copies if is_shared else 1,
                enters=False,
            )
            setattr(block, name, made)
        for name in blocks.rows[block]:
            rows = RowParallelLinear.from_linear(
                getattr(block, name),
                group=self.group,
                unit=num_together * width,
                sequence_dim=self.sequence_dim,
            )
            setattr(block, name, rows)
        if num_copies > 1:
            begin, end = block.q_proj.features
            block.num_key_value_groups = (end - begin) // width
        block.register_forward_pre_hook(self._enter, with_kwargs=True)

    def sum_over_ranks(self, module: nn.Module) -> None:
        """Gradients of weights that each rank uses on heads or tokens of its own."""
        for param in module.parameters():
            if param.requires_grad:
                sum_gradients(param, self.group)

    def share_tokens(self, base: Any, done: list[nn.Module]) -> None:
        """From the first layer's input to the last norm's output."""
        base.register_forward_pre_hook(_refuse_embeddings, with_kwargs=True)
        base.layers[0].register_forward_pre_hook(self._leave, with_kwargs=True)
        base.norm.register_forward_hook(self._enter_output)
        for module in base.modules():
            is_whole = not isinstance(module, SplitModule) and module not in done
            for param in module.parameters(recurse=False) if is_whole else ():
                if param.requires_grad:
                    sum_gradients(param, self.group)

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_first(
            lambda x: enter(x, self.group, sequence_dim=self.sequence_dim, inplace=True),
            args,
            kwargs,
        )

    def _leave(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_first(
            lambda x: leave(x, self.group, sequence_dim=self.sequence_dim), args, kwargs
        )

    def _enter_output(self, _: nn.Module, args: Any, output: Tensor) -> Tensor:
        return enter(output, self.group, sequence_dim=self.sequence_dim)


def _with_first(change: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a layer with other hidden states."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _refuse_embeddings(_: nn.Module, args: Any, kwargs: Any) -> None:
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError("sequence_parallel wants input_ids, and got inputs_embeds")
