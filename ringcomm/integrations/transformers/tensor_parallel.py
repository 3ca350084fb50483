"""Tensor parallelism for models of transformers, by the plan in each model's config."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.backend import resolve_group
from ringcomm.integrations.transformers.experts import is_stacked
from ringcomm.integrations.transformers.training import (
    causal_lm_loss,
    loss_options_of,
    typed_logits,
)
from ringcomm.nn import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from ringcomm.parallel.expert.local_experts import LocalExperts
from ringcomm.parallel.model.describe import describe, start_equal
from ringcomm.parallel.model.refuse import Asked, refuse
from ringcomm.parallel.model.saving import save_full
from ringcomm.parallel.tensor.layers import HeadShares, share_heads
from ringcomm.parallel.tensor.regions import (
    all_reduce_grad_,
    copy_to_tp,
    reduce_from_tp,
    summed_over,
)
from ringcomm.parallel.tensor.replicas import are_same, check_replicas
from ringcomm.parallel.tensor.splits import SplitModule, mesh_of
from ringcomm.torch_names import has_forward_hooks

Change = Callable[..., Tensor]
COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"


def tensor_parallelize(
    model: Any,
    group: dist.ProcessGroup | None = None,
    *,
    mesh: DeviceMesh | None = None,
    sequence_parallel: bool = False,
    gather_logits: bool = False,
) -> Any:
    """Splits a causal language model over the ranks of a group (Shoeybi et al. 2019).

        model = tensor_parallelize(AutoModelForCausalLM.from_pretrained(...), group)
        model(input_ids=ids, labels=ids).loss.backward()  # the same rows on all ranks
        model.generate(ids)  # the same tokens on all ranks; to sample, use one seed
        model.save_pretrained(folder)  # on all ranks; rank 0 writes the full model

    Attention is split by heads, the rest by features, embedding and output by vocabulary. A layer
    has two all_reduces of its activations forward and two backward.

    Args:
        model: a model of transformers with a tensor-parallel plan in its config (Llama, Mistral,
            Qwen, ...), unsharded. It is changed in place, and starts from the weights and buffers
            of the group's rank 0. The parameters of its layers may be on the meta device, for
            ringcomm.parallel.set_state_dict(), and buffers until the first forward. Make optimizers
            afterwards; they must update each element of a weight by itself, as AdamW does. Muon,
            Adafactor and LBFGS raise at their first step.
        group: None for the default group.
        mesh: a one-dimensional DeviceMesh, instead of a group.
        sequence_parallel: shard the tokens over the ranks between sharded layers (Korthikanti
            et al. 2022). It sends the same bytes and needs 1/N of the memory for those activations.
            It needs input_ids, with a length that is a multiple of the number of ranks.
        gather_logits: gather the logits on all ranks before the loss, too. Without it the loss
            takes one collective over sharded logits, which the output then has as a DTensor.
            Logits without labels are always gathered.

    Returns:
        `model`.

    Raises:
        TypeError: the model has no tensor-parallel plan.
        ValueError: the model is already sharded; its plan has a style that is not supported; an
            embedding or linear layer does not compute what torch's does; the ranks cannot split the
            heads; or, with sequence_parallel, the model has other parts than an embedding, layers
            of blocks and norms, and a last norm. The model is unchanged.

    forward() raises ValueError if a buffer is on the meta device, if it returns attentions, or
    hidden states of sharded tokens, and without gradients if ranks have different ids. In training
    mode, in calls number 1, 2, 4, 8 and so on, it raises ValueError if ranks have different ids,
    labels or masks; if they draw different random numbers, such as for the dropout of a head; for
    dropout in attention and feed-forward networks, whose parts ranks have; for random numbers in
    any layer with sequence_parallel; and for trained modules that were added there later, such as
    adapters.

    Collective.
    """
    resolved = resolve_group(group, mesh)
    base = getattr(model, "base_model", None)
    plan = getattr(getattr(base, "config", None), "base_model_tp_plan", None)
    name = type(model).__name__
    if base is None:
        raise TypeError(f"{name} is not a model of transformers: build its layers from ringcomm.nn")
    if not plan:
        raise TypeError(f"the config of {name} has no tensor-parallel plan")
    if any(isinstance(module, SplitModule) for module in model.modules()):
        raise ValueError("the model is already tensor-parallel")
    refuse(describe(model), Asked("tensor_parallelize", "tensor_parallelize"))
    head = model.get_output_embeddings() if base is not model else None
    if sequence_parallel and head is None:
        raise ValueError("sequence_parallel needs a model with an output layer over a vocabulary")
    blocks = _Blocks(base, plan)
    whole = model.get_input_embeddings()
    scale = _scale_of(whole)
    if head is not None:
        _check_plain(head, nn.Linear, "the output layer")
    ends = _ends_of_tokens(base, whole, blocks) if sequence_parallel else None
    heads: dict[Any, HeadShares] = {}
    for block in blocks.columns:
        if hasattr(block, "num_key_value_groups"):
            num, num_kv = (
                getattr(block, name).out_features // block.head_dim for name in ("q_proj", "k_proj")
            )
            heads[block] = share_heads(num, num_kv, resolved.size())
    loss_options = loss_options_of(model) if head is not None and not gather_logits else None
    where: dict[str, Any] = {"group": resolved, "sequence_dim": 1 if sequence_parallel else None}
    enter, leave = partial(copy_to_tp, **where), partial(reduce_from_tp, **where)
    for block in blocks.columns:
        _split_block(blocks, block, heads.get(block), enter, **where)
    embedding = VocabParallelEmbedding.from_embedding(
        whole, group=resolved, reduce_output=not sequence_parallel
    )
    if scale is not None:
        embedding.register_buffer("embed_scale", scale, persistent=False)
        embedding.register_forward_hook(
            lambda module, _, output: output * module.get_buffer("embed_scale").to(output.dtype)
        )
    embedding.register_forward_pre_hook(_check_ids)
    model.set_input_embeddings(embedding)
    # Each rank uses these weights on its own heads or tokens.
    summed = {param for module in blocks.summed for param in module.parameters()}
    if ends is not None:
        around = _share_tokens(base, ends, enter, leave)
        summed |= {param for module in around for param in module.parameters(recurse=False)}
    for param in summed:
        all_reduce_grad_(param, resolved)
    if resolved.size() > 1:
        outputs = ["output_attentions", *(["output_hidden_states"] if sequence_parallel else [])]
        # Here ranks have different heads, features or tokens; elsewhere they draw the same masks.
        apart = [base] if sequence_parallel else list(blocks.columns)
        names = {module: name for name, module in base.named_modules()}
        checks = _Checks({names[module]: module for module in apart}, outputs)
        base.register_forward_pre_hook(checks, with_kwargs=True)
        check_replicas(model, resolved, compares_inputs=True)
        if sequence_parallel:
            check_replicas(base, resolved, may_draw=False)
    if head is not None:
        # The tokens are gathered after the last norm already: the head may select some of them.
        made = ColumnParallelLinear.from_linear(
            head, group=resolved, copy_input=not sequence_parallel, gather_output=gather_logits
        )
        if head.weight is whole.weight:
            made.weight = embedding.weight
        model.set_output_embeddings(made)
        if loss_options is not None:
            options = {"group": resolved, "vocab_start": made.features[0], **loss_options}
            model.loss_function = partial(causal_lm_loss, **options)
            if resolved.size() > 1:
                if not made.weight.is_meta:
                    mesh_of(resolved, made.weight.device)  # torch.compile cannot trace a new one
                model.register_forward_hook(partial(typed_logits, made))
    start_equal(describe(model), [resolved])
    save_full(model)
    return model


def _check_ids(embedding: Any, args: tuple[Tensor, ...]) -> None:
    """Ranks that sample with different seeds would continue different texts."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or embedding.group.size() == 1:
        return
    if not are_same([args[0]], embedding.group):
        raise ValueError(
            "the tensor-parallel ranks have different input ids: give them the same rows, and to"
            " sample, call torch.manual_seed() with one seed on all ranks"
        )


class _Blocks:
    """The layers of a model, grouped by their style in the plan."""

    def __init__(self, base: nn.Module, plan: Mapping[str, str]) -> None:
        # By the module around layers that share its input: their names in it, and those behind.
        self.columns: dict[nn.Module, list[str]] = {}
        self.rows: dict[nn.Module, list[str]] = {}
        self.summed: list[nn.Module] = []  # what all ranks have, on activations that differ
        # Ranks of the group all have the complete experts and send the same tokens.
        experts = tuple(
            f"{name}."
            for name, module in base.named_modules()
            if isinstance(module, LocalExperts) or is_stacked(module)
        )
        for name, module in [*base.named_modules(), *base.named_parameters()]:
            # As transformers does: a number is any number.
            is_expert = f"{name}.".startswith(experts)
            style = None if is_expert else plan.get(re.sub(r"\b\d+\b", "*", name))
            is_module = isinstance(module, nn.Module)
            if style == SUMMED and is_module:
                self.summed.append(module)
            elif style in (COLUMNS, ROWS) and isinstance(module, nn.Linear):
                _check_plain(module, nn.Linear, name)
                parent, _, leaf = name.rpartition(".")
                found = self.columns if style == COLUMNS else self.rows
                found.setdefault(base.get_submodule(parent), []).append(leaf)
            elif style is not None:
                kind = f" a {type(module).__name__}," if is_module else ""
                raise ValueError(
                    f"the model's plan has the style {style} for {name},{kind} which is not"
                    " supported"
                )
        # All modules with weights must be in the plan: their input is copied once.
        for block, columns in self.columns.items():
            known, kind = {*columns, *self.rows.get(block, ())}, type(block).__name__
            for name, module in block.named_children():
                if name not in known and module not in self.summed and [*module.parameters()]:
                    raise ValueError(f"{name} of a {kind} is not in the model's plan")
            if block not in self.rows:
                raise ValueError(
                    f"the plan splits a {kind} by columns, and no row-parallel layer sums its"
                    " outputs"
                )


def _check_plain(module: nn.Module, kind: type[nn.Module], name: str) -> None:
    """A shard must compute what torch's own layer computes; hooks would be lost."""
    is_plain = type(module).forward is kind.forward and "forward" not in vars(module)
    if not is_plain or has_forward_hooks(module):
        raise ValueError(
            f"{name}, a {type(module).__name__}, does not compute what {kind.__name__} computes, "
            "or has hooks, which its shards would not run"
        )


def _scale_of(embedding: nn.Module) -> Tensor | None:
    """The factor of Gemma's embeddings; None for torch's own."""
    scale = getattr(embedding, "embed_scale", None)
    if type(embedding).__name__.endswith("ScaledWordEmbedding") and isinstance(scale, Tensor):
        return scale
    _check_plain(embedding, nn.Embedding, "the embedding")
    return None


def _ends_of_tokens(
    base: Any, embedding: nn.Module, blocks: _Blocks
) -> tuple[nn.Module, nn.Module]:
    """The first layer and the last norm, between which tokens are sharded.

    Other modules may mix tokens, or change the embedding's result, which is a partial sum.
    """
    name = type(base).__name__
    layers = getattr(base, "layers", None)
    rest = {
        child: module
        for child, module in base.named_children()
        if module is not embedding
        and module is not layers
        and not isinstance(module, nn.Dropout)
        and "Rotary" not in type(module).__name__
    }
    # transformers' pipeline plan lists the modules called between embedding and output, in order.
    calls = list(getattr(base.config, "base_model_pp_plan", None) or ())
    is_known = len(rest) == 1 and calls[-2:] == ["layers", *rest]
    if not isinstance(layers, nn.ModuleList) or not is_known:
        raise ValueError(
            f"sequence_parallel needs an embedding, layers and one norm after them, but {name}"
            f" has {[child for child, _ in base.named_children()]}, called as {calls}: leave it"
            " out"
        )
    split = {b.get_submodule(n) for of in (blocks.columns, blocks.rows) for b in of for n in of[b]}
    for child, module in base.named_modules():
        if module is embedding or module in split or module in blocks.summed:
            continue
        if [*module.parameters(recurse=False)] and "Norm" not in type(module).__name__:
            raise ValueError(
                f"sequence_parallel needs layers of tensor-parallel blocks and norms, but {child}"
                f" of {name} is a {type(module).__name__}: leave it out"
            )
    return layers[0], next(iter(rest.values()))


class _Checks:
    """A hook that raises ValueError for calls in which ranks would compute different things.

    Args:
        apart: modules by name in which ranks have different heads, features or tokens. They may
            not have dropout, nor trained weights that were added later, such as adapters.
        outputs: names of outputs that would be this rank's part.
    """

    def __init__(self, apart: Mapping[str, nn.Module], outputs: Sequence[str]) -> None:
        self._apart, self._outputs, self._num_calls = apart, outputs, 0
        self._known = {module for top in apart.values() for module in top.modules()}

    def __call__(self, base: Any, _: Any, kwargs: dict[str, Any]) -> None:
        for name in self._outputs:
            if kwargs.get(name, getattr(base.config, name, False)):
                raise ValueError(
                    f"{name} would return what this tensor-parallel rank has, a part of the heads"
                    " or tokens: leave it out"
                )
        if not self._num_calls and not torch.compiler.is_compiling():
            for name, buffer in base.named_buffers():
                if buffer.is_meta:
                    raise ValueError(
                        f"{name} is a buffer on the meta device, which checkpoints may not have:"
                        " take the module around it from a model that was made on the CPU"
                    )
        is_counted = base.training and not torch.compiler.is_compiling()
        self._num_calls += is_counted
        if not base.training or (is_counted and self._num_calls & (self._num_calls - 1)):
            return  # as check_replicas()
        for outer, top in self._apart.items():
            for name, module in top.named_modules(prefix=outer):
                self._check_module(name, module)

    def _check_module(self, name: str, module: nn.Module) -> None:
        options = {"p": module.p} if "Dropout" in type(module).__name__ else vars(module)
        for option, value in options.items():
            is_rate = option == "p" or "dropout" in option or option.endswith("pdrop")
            if is_rate and isinstance(value, float) and value > 0:
                raise ValueError(
                    f"{name} has a dropout of {value}, but the tensor-parallel ranks have different"
                    " parts of what it drops: set it to 0"
                )
        if module in self._known or isinstance(module, SplitModule):
            return
        for param in module.parameters(recurse=False):
            if param.requires_grad and summed_over(param) is None:
                raise ValueError(
                    f"{name}, a {type(module).__name__}, was added after tensor_parallelize(), and"
                    " each rank would train it on a part of its gradient: freeze it, or pass its"
                    " parameters to ringcomm.parallel.tensor.all_reduce_grad_()"
                )


def _split_block(
    blocks: _Blocks, block: Any, heads: HeadShares | None, enter: Change, **where: Any
) -> None:
    """An attention or a feed-forward network; its input passes enter() once for all layers."""
    width = 1 if heads is None else block.head_dim
    num_together, num_replicas = heads or (1, 1)
    num_heads = 1 if heads is None else block.q_proj.out_features // width
    for name in blocks.columns[block]:
        whole = getattr(block, name)
        is_shared = heads is not None and name in ("k_proj", "v_proj")
        of_head = 1 if heads is None else whole.out_features // num_heads  # 1 of a gate per head
        columns = ColumnParallelLinear.from_linear(
            whole,
            group=where["group"],
            shard_multiple=width if is_shared else num_together * of_head,
            num_replicas=num_replicas if is_shared else 1,
            copy_input=False,
        )
        setattr(block, name, columns)
    for name in blocks.rows[block]:
        multiple = num_together * width
        whole = getattr(block, name)
        setattr(block, name, RowParallelLinear.from_linear(whole, shard_multiple=multiple, **where))
    if num_replicas > 1:
        begin, end = block.q_proj.features
        block.num_key_value_groups = (end - begin) // width
    block.register_forward_pre_hook(_with_first(partial(enter, inplace=True)), with_kwargs=True)


def _share_tokens(
    base: Any, ends: tuple[nn.Module, nn.Module], enter: Change, leave: Change
) -> list[nn.Module]:
    """Shards tokens between the first layer's input and the last norm's output."""
    first, last = ends
    base.register_forward_pre_hook(refuse_embeddings, with_kwargs=True)
    first.register_forward_pre_hook(_with_first(leave), with_kwargs=True)
    last.register_forward_hook(lambda _, __, output: enter(output))
    return [module for module in base.modules() if not isinstance(module, SplitModule)]


def _with_first(change: Change) -> Any:
    """A hook that changes the hidden states among the arguments of a layer."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    return hook


def refuse_embeddings(_: nn.Module, args: Any, kwargs: Any) -> None:
    """Raises ValueError if a model gets embeddings: sequence_parallel needs ids."""
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError("sequence_parallel needs input_ids, got inputs_embeds")
