"""A model as parallelize() uses it: wrappers, plans, experts and the loss are looked up once."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.integrations.transformers import expert_parallelize, tensor_parallelize
from ringcomm.integrations.transformers.experts import is_stacked
from ringcomm.integrations.transformers.pipeline import pipeline_blocks, problem_of_blocks
from ringcomm.integrations.transformers.training import is_causal_lm_loss
from ringcomm.parallel.batches import Batch
from ringcomm.parallel.expert.local_experts import LocalExperts
from ringcomm.parallel.loss import PartLoss
from ringcomm.parallel.loss_check import is_integer
from ringcomm.parallel.mesh import ParallelDims
from ringcomm.parallel.model.describe import Model
from ringcomm.parallel.tensor.regions import gather_from_tp
from ringcomm.parallel.tensor.splits import SplitModule

_IN_PIPELINE = ("input_ids", "attention_mask", "position_ids")


class Adapter:
    """A model of transformers, perhaps in wrappers; or any other model, or a dict of blocks.

    Attributes:
        dims: the mesh.
        systems: that will split it, as parallel/model/refuse.py names them, and its axes.
        name: of its class, for messages.
        has_loss: whether its own loss is asked for.
        is_row: whether it is a sequence of blocks itself.
        is_split, has_experts: whether it has tensor-parallel layers, or sharded experts.
        has_stacked: whether it has experts for expert_parallelize().
        config: of a model of transformers; None for others.
        has_tensor_plan, has_pipeline_plan, has_router_loss: what that config says.
        is_peft, adds_tokens: whether PEFT has changed it, and puts learned tokens before a batch's.
    """

    def __init__(
        self, model: Any, described: Model, dims: ParallelDims, part_loss: PartLoss | None
    ) -> None:
        """`part_loss` is None for the loss in the model."""
        self._given, self._model = model, described.unwrapped
        self.dims, self._part_loss = dims, part_loss
        self.name, self.has_loss = type(model).__name__, part_loss is None
        self.is_row = isinstance(model, nn.Sequential | nn.ModuleList | Mapping)
        kinds = {type(module) for module in described.module.modules()}
        self.is_split = any(issubclass(kind, SplitModule) for kind in kinds)
        self.has_experts = any(issubclass(kind, LocalExperts) for kind in kinds)
        self.has_stacked = any(is_stacked(module) for module in described.module.modules())
        self.systems = {axis for axis in ("tp", "pp", "ep") if getattr(dims, axis) > 1}
        self.systems |= {"Pipeline"} if dims.pp > 1 else set()
        self.systems |= {"tensor_parallelize"} if dims.tp > 1 and not self.is_split else set()
        base = getattr(self._model, "base_model", None)
        self.config = getattr(base, "config", None)
        self.has_tensor_plan = bool(getattr(self.config, "base_model_tp_plan", None))
        plan = getattr(self.config, "base_model_pp_plan", None) or ()
        has_ends = "layers" in plan and all(hasattr(base, name) for name in plan)
        has_ends = has_ends and base is not self._model
        self.has_pipeline_plan = has_ends and self._model.get_output_embeddings() is not None
        self.has_router_loss = bool(getattr(self.config, "output_router_logits", False))
        self.is_peft = hasattr(model, "get_base_model")
        peft_config = getattr(model, "active_peft_config", None)
        self.adds_tokens = getattr(peft_config, "is_prompt_learning", False)

    def problem_of_blocks(self) -> str:
        """Why a pipeline cannot run the model, or ""; layers of groups are not run here."""
        if not self.has_loss or self.is_split or self.has_experts:
            return ""
        return problem_of_blocks(self._model)

    def split(self, **options: Any) -> PartLoss:
        """Splits experts, layers and for a pipeline blocks, and returns the loss.

        Options are those of tensor_parallelize(). What is split already stays. Collective.
        """
        dims = self.dims
        # With all experts on each tensor-parallel rank, layers have groups of one rank.
        if self.has_stacked and (dims.ep > 1 or dims.tp > 1):
            replicas = dims.group("edp") if dims.ep > 1 and dims["edp"].size() > 1 else None
            expert_parallelize(self._model, group=dims.group("ep"), replica_group=replicas)
        if "tensor_parallelize" in self.systems:
            tensor_parallelize(self._model, dims.group("tp"), **options)
        if self._part_loss is not None:
            self._part_loss.blocks = self._given if dims.pp > 1 else None
            return self._part_loss
        return LossInModel(self._model, dims.group("tp"), in_pipeline=dims.pp > 1)


class LossInModel(PartLoss):
    """A model's own loss; in a pipeline its loss of logits.

    If it is not ForCausalLMLoss it is asked whether it is the mean over labels other than -100.
    """

    def __init__(self, model: Any, group: dist.ProcessGroup, *, in_pipeline: bool) -> None:
        """Of a model without wrappers, whose layers may be tensor-parallel over the group."""
        self._name, self._config, self._group = type(model).__name__, model.config, group
        code = inspect.unwrap(type(model).forward).__code__
        # Whether label n + 1 is that of token n. T5 has the function, and computes another loss.
        is_called = "loss_function" in code.co_names
        self._is_shifted = is_called and is_causal_lm_loss(model.loss_function)
        # The routers' loss, which is a mean, is weighted together with that of the tokens.
        has_routers = getattr(model.config, "output_router_logits", False)
        takes_number = bool(code.co_flags & inspect.CO_VARKEYWORDS) and not has_routers
        loss: Any = _loss_of
        if in_pipeline:
            loss = partial(model.loss_function, vocab_size=model.config.vocab_size)
        super().__init__(loss, asks=not self._is_shifted)
        self._divides = self._is_shifted and (in_pipeline or takes_number)
        self.blocks = pipeline_blocks(model) if in_pipeline else None
        head: Any = model.get_output_embeddings()
        ranges = head.splits["weight"].ranges if hasattr(head, "splits") else ()
        self._logit_sizes = [end - begin for begin, end in ranges]

    def checked(self, batch: Batch) -> Batch:
        """The batch with its arguments by name, or for a pipeline's first block.

        Raises ValueError for arguments that a pipeline does not pass on, and for packed sequences
        that the model does not separate.
        """
        if len(batch.args) > 1:
            raise TypeError(
                f"a model of transformers takes one tensor, input_ids, or a dict; got"
                f" {len(batch.args)} tensors"
            )
        kwargs = {**({"input_ids": batch.args[0]} if batch.args else {}), **batch.kwargs}
        _check_packed(self._config, kwargs)
        if self.blocks is None:
            return batch._replace(args=(), kwargs=kwargs)
        unknown = [name for name in kwargs if name not in _IN_PIPELINE]
        if unknown or "input_ids" not in kwargs:
            raise ValueError(
                f"a pipeline takes input_ids, attention_mask and position_ids, got {[*kwargs]}"
            )
        return batch._replace(args=(kwargs.pop("input_ids"),), kwargs=kwargs)

    def labels_of(self, batch: Batch) -> Tensor:
        """The labels of which those that are not -100 count."""
        if "shift_labels" in batch.kwargs:
            return batch.kwargs["shift_labels"]
        return batch.targets[..., 1:] if self._is_shifted else batch.targets

    def arguments(self, targets: Tensor, num_own: float, num_items: float) -> dict[str, Any]:
        """The model's arguments for the loss; without labels only if its loss would be NaN."""
        # With a cache, transformers does not look for packed sequences.
        cache = {"use_cache": False} if self._is_shifted else {}
        if self._divides:
            return {"labels": targets, "num_items_in_batch": num_items, **cache}
        return {"labels": targets, **cache} if num_own else cache

    def result_of(self, output: Any) -> Tensor:
        """The logits of the whole vocabulary. Collective in a pipeline."""
        if self.blocks is None:
            return output.logits
        if self._group.size() == 1 or not self._logit_sizes:
            return output
        return gather_from_tp(output, self._logit_sizes, self._group)

    def _ask(self, output: Any, targets: Tensor) -> str:
        if self.blocks is not None:
            return super()._ask(output, targets)
        logits, kinds = getattr(output, "logits", None), self.labels(targets).kinds
        if not is_integer(targets) or (targets.dim() == 1 and not kinds):
            return ""  # a mean over rows
        if isinstance(logits, Tensor) and logits.shape[:-1] == targets.shape:
            flat = logits.detach().float().flatten(0, -2)
            with suppress(IndexError):
                wanted = nn.functional.cross_entropy(flat, targets.flatten())
                rtol = max(1e-4, 4 * torch.finfo(logits.dtype).eps)
                if torch.allclose(output.loss.detach().float(), wanted, rtol):
                    return ""
        return (
            f"{self._name} has a loss of its own, which is not the mean over labels other than"
            " -100, so losses of ranks and micro-batches cannot be weighted: pass loss_fn"
        )


def _loss_of(output: Any, *_: Any, **__: Any) -> Tensor:
    """The loss that a model has computed itself."""
    return output.loss


def _check_packed(config: Any, batch: Mapping[str, Any]) -> None:
    """Raises ValueError if sequences packed into a row would attend to each other.

    Positions that restart mark packed sequences. transformers sees them without an attention mask
    and a cache, and flash attention in batches of one row only.
    """
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    uses_flash = "flash" in str(getattr(config, "_attn_implementation", ""))
    if "cu_seq_lens_q" in batch and positions is None and not uses_flash:
        raise ValueError(
            "cu_seq_lens_q is for flash attention only, and the model does not use it: pass"
            " position_ids that restart in each sequence"
        )
    if not isinstance(positions, Tensor) or positions.is_meta or positions.dim() != 2:
        return
    restarts = positions.diff(dim=1) != 1
    if isinstance(mask, Tensor) and mask.shape == positions.shape:
        restarts &= mask[:, 1:].bool() & mask[:, :-1].bool()  # not between padding and tokens
    if not restarts.any():
        return
    reason = None
    if mask is not None and mask.dim() == 2:
        reason = "with an attention_mask of two dimensions: leave it out"
    elif uses_flash and len(positions) > 1:
        reason = "by flash attention with several rows: pack all sequences into one row"
    elif importlib.util.find_spec("transformers.masking_utils") is None:
        reason = "by this version of transformers: update it"
    if reason is not None:
        raise ValueError(f"position_ids restart, but packed sequences are not separated {reason}")
