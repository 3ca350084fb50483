"""Messages between stages, and torch's PipelineStage with early release of messages."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from ringcomm.errors import RingcommError
from ringcomm.parallel.expert.local_experts import dry_experts
from ringcomm.parallel.flat_collectives import largest_of
from ringcomm.parallel.model.units import forked_generators, fsdp_roots
from ringcomm.parallel.pipeline.blocks import StageModule
from ringcomm.parallel.pipeline.schedules import Kind, Plan
from ringcomm.parallel.pipeline.torch_stage import HAS_HALVES, TorchStage, meta_like
from ringcomm.torch_names import (
    FakeTensorMode,
    accumulating,
    gather_outside_inference_mode,
    version_of,
)
from ringcomm.trace.program import as_backward, unrecorded

Metas = tuple[Tensor, ...]  # of one micro-batch, on the meta device


class Runtime(NamedTuple):
    """What a pipeline runs on this rank: its plan and stages, the latter also with wrappers."""

    plan: Plan
    modules: Mapping[int, StageModule]
    wrapped: Mapping[int, nn.Module]
    device: torch.device
    group: dist.ProcessGroup


def zeros(metas: Metas, device: torch.device) -> tuple[Tensor, ...]:
    """Zeros with the same shapes, dtypes and requires_grad."""
    return tuple(
        torch.zeros(m.shape, dtype=m.dtype, device=device, requires_grad=m.requires_grad)
        for m in metas
    )


def shown(tensors: tuple[Tensor, ...]) -> str:
    """Dtypes and shapes as text."""
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)


def find_boundaries(
    runtime: Runtime, metas: Metas, names: Sequence[str], *, computes: bool
) -> list[Metas]:
    """The inputs of each stage, and at the end the outputs of the last stage.

    With `computes`, runs a forward pass with zeros, in which modules may create persistent state
    such as a table of positions. Otherwise tries fake tensors first, which need no computation.
    `metas` are those of the first stage, and last the keyword arguments of all blocks, which have
    these names. Raises ValueError on all ranks if a stage fails. Collective.
    """
    plan, modules, _, device, group = runtime
    num_inputs = len(metas) - len(names)
    found = [metas[:num_inputs]]
    for module in modules.values():
        values = zeros(metas[num_inputs:], device)
        module.kwargs, module.micro_batch = (dict(zip(names, values, strict=True)),), 0
    for stage in range(plan.num_stages):
        answer: list[Any] = [None]
        if stage in modules:
            try:
                with dry_experts(modules[stage]):
                    outputs = None if computes else _inferred(modules[stage], found[-1], device)
                    answer = [outputs or _computed(modules[stage], found[-1], device)]
            except Exception as error:
                answer = [f"{type(error).__name__}: {error}"]
        owner = plan.rank_of(stage)
        dist.broadcast_object_list(answer, group=group, group_src=owner)
        if isinstance(answer[0], str):
            raise ValueError(
                f"stage {stage} (rank {owner}) failed with {shown(found[-1])}: {answer[0]}"
            )
        found.append(answer[0])
    return found


def _metas_of(value: Any) -> Metas:
    tensors = value if isinstance(value, tuple) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"a block must return a tensor or a tuple of tensors, got {type(tensor).__name__}"
            )
    return tuple(meta_like(t, t.requires_grad) for t in tensors)


def _computed(module: StageModule, inputs: Metas, device: torch.device) -> Metas:
    """Computes them, and restores generators; notes writes into inputs."""
    with _resharded(module), torch.enable_grad(), forked_generators(device):
        values = tuple(value.clone() for value in zeros(inputs, device))
        outputs = functional_call(module, _copied_buffers(module), values)
    module.writes_inputs |= any(version_of(value) > 0 for value in values)
    return _metas_of(outputs)


@contextmanager
def _resharded(module: nn.Module) -> Iterator[None]:
    """For forward passes without a backward pass.

    fully_shard would keep the weights of the outermost units gathered, of a pass with fake tensors
    without values. Data-parallel ranks also gather in the same calls, whatever shapes they know.
    """
    try:
        yield
    finally:
        for root in fsdp_roots(module):
            if hasattr(root, "reset_iter_state"):  # from torch 2.13 on; also after an error
                with suppress(AttributeError):  # of a root that has never run
                    root.reset_iter_state()
            else:
                for unit in root.modules():
                    if isinstance(unit, FSDPModule):
                        unit.reshard()


def _copied_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _inferred(module: StageModule, inputs: Metas, device: torch.device) -> Metas | None:
    """Uses fake tensors; None if the module does not support these, as when it reads values."""
    # A module's attributes, and the contents of containers among them.
    kept = [
        (vars(part), {k: (v, _inside(v)) for k, v in vars(part).items()})
        for part in module.modules()
    ]
    buffers = _copied_buffers(module)  # fake tensors change real buffers of one element
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # otherwise it would keep fake copies of weights
    try:
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        with _resharded(module), torch.enable_grad(), fakes:
            value = functional_call(module, buffers, zeros(inputs, device))
        return _metas_of(value)
    except Exception:
        return None
    finally:
        torch.set_autocast_cache_enabled(caches)
        for attributes, before in kept:
            attributes.clear()
            for name, (value, inside) in before.items():
                attributes[name] = value
                if isinstance(value, list):
                    value[:] = inside
                elif inside is not None:
                    value.clear()
                    value.update(inside)


def _inside(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list | set) else None


class Stage(TorchStage):
    """One stage of a pipeline on its rank."""

    def __init__(
        self,
        runtime: Runtime,
        stage_idx: int,
        boundaries: Sequence[Metas],
        after_backward: Sequence[Callable[[], None]],
    ) -> None:
        self._own = own = runtime.modules[stage_idx]  # the module without its wrapper
        module, (inputs, outputs) = runtime.wrapped[stage_idx], boundaries[stage_idx:][:2]
        # The input half of a backward then also computes the weight half. torch would recompute a
        # checkpoint once for each group of weights, and find no weights after frozen blocks.
        has_no_halves = own.recompute or not HAS_HALVES or not any(m.requires_grad for m in inputs)
        super().__init__(
            module,
            stage_idx,
            runtime.plan.num_stages,
            runtime.device,
            input_args=inputs,
            output_args=outputs,
            group=runtime.group,
            dw_builder=(lambda: lambda: None) if stage_idx > 0 and has_no_halves else None,
        )
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                gather_outside_inference_mode(unit)
        self._after_backward = after_backward
        self._used: set[int] = set()  # indices of weights with a gradient on this rank
        self._expected = outputs

    # ---- computing

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError if the output's shape differs from that when stages were made."""
        self._own.micro_batch = fwd_chunk_id
        try:
            result = self._timed("F", super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            raise error.__cause__ or error  # noqa: B904  # torch tells of tensors only
        tensors = result if isinstance(result, tuple) else (result,)
        kinds = [[(t.shape, t.dtype) for t in some] for some in (tensors, self._expected)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"stage {self.stage_index} returned {shown(tensors)}, but the next stage expects"
                f" {shown(self._expected)}: was the model changed after the Pipeline was made?"
                " Make a new Pipeline of it"
            )
        return result

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """The backward pass of a micro-batch, or its half for the inputs."""
        kind: Kind = "B" if kwargs.get("full_backward", True) else "I"
        self._run_backward(kind, super().backward_one_chunk, bwd_chunk_id, *args, **kwargs)
        if kind == "B" and (loss := kwargs.get("loss")) is not None:
            # torch keeps losses until the step ends, and their graphs what the stage received.
            loss.detach_()
        for call in self._after_backward:
            call()
        if bwd_chunk_id in self.bwd_cache:  # gradients become messages
            grads = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(
                grad.contiguous() if isinstance(grad, Tensor) else grad for grad in grads
            )

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """The half of the backward pass for the weights."""
        self._run_backward("W", super().backward_weight_one_chunk, *args, **kwargs)

    @as_backward
    def _run_backward(self, kind: Kind, call: Callable[..., Any], *args: Any, **kw: Any) -> None:
        """As if `with autocast()` ended before loss.backward()."""
        with torch.autocast(self.device.type, enabled=False):
            self._timed(kind, call, *args, **kw)
        self._note_used()

    def drop_unused(self) -> None:
        """After a step: drops zeros that fully_shard has reduced for weights that no rank uses."""
        if not isinstance(self.submod, FSDPModule):
            return
        by_mesh: dict[Any, dict[int, Any]] = {}  # experts have another
        for idx, param in enumerate(self.submod.parameters()):
            if isinstance(param, DTensor):  # not of ignored_params
                by_mesh.setdefault(param.device_mesh, {})[idx] = param
        for mesh, params in by_mesh.items():
            facts = [idx in self._used for idx in params]
            used = largest_of(facts, mesh.get_all_groups(), torch.uint8)
            for param, is_used in zip(params.values(), used, strict=True):
                if not is_used:
                    param.grad = None

    def _note_used(self) -> None:
        """Notes the weights with a gradient, of which fully_shard may have the whole now."""
        if isinstance(self.submod, FSDPModule):
            params, kept = enumerate(self.submod.parameters()), accumulating(self.submod)
            self._used |= {i for i, p in params if p.grad is not None or p in kept}

    def extend_forward(self, call: Callable[..., Any], *args: Any) -> Any:
        """Extends the last forward pass by the loss."""
        result = call(*args)
        if (log := self._own.log) is not None:
            log[-1] = (*log[-1][:4], self._now_us())
        return result

    def _timed(self, kind: Kind, run: Callable[..., Any], chunk: int, *args: Any, **kw: Any) -> Any:
        if (log := self._own.log) is None:
            return run(chunk, *args, **kw)
        begin_us = self._now_us()
        result = run(chunk, *args, **kw)
        log.append((kind, self.stage_index, chunk, begin_us, self._now_us()))
        return result

    def _now_us(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.monotonic_ns() / 1e3

    def clear_runtime_states(self) -> None:
        """Clears the state of the last step, also of a failed one."""
        super().clear_runtime_states()
        for left in (self.bwd_cache, self.backward_state, self.dw_runner):
            left.clear()
        self._used.clear()
        self._note_used()  # gradients of earlier steps


@contextmanager
def aborted_on_failure(group: dist.ProcessGroup) -> Iterator[None]:
    """Aborts the group after a failure, so that other ranks do not wait for messages."""
    try:
        yield
    except RingcommError:
        raise
    except Exception:
        group.abort()
        raise


# The number of input shapes with cached stages; the least recently used is evicted first.
MAX_SHAPES = 64


class Made(NamedTuple):
    """What a pipeline keeps for one shape of inputs."""

    boundaries: list[Metas]
    schedule: Any
    stages: list[Stage]
    number: int  # the same on all ranks; 1 of the first


@unrecorded()
def make_stages(
    runtime: Runtime,
    metas: Metas,
    names: Sequence[str],
    after_backward: Sequence[Callable[[], None]],
    *,
    loss_fn: Callable[..., Tensor],
    number: int,
) -> Made:
    """This rank's stages for inputs and keyword arguments. Collective; see find_boundaries()."""
    found = find_boundaries(runtime, metas, names, computes=number == 1)
    stages = [Stage(runtime, idx, found, after_backward) for idx in runtime.modules]
    schedule = runtime.plan.start(stages, partial(stages[-1].extend_forward, loss_fn))
    return Made(found, schedule, stages, number)


def forward_only(
    runtime: Runtime, boundaries: Sequence[Metas], inputs: Sequence[tuple[Tensor, ...]]
) -> list[Any]:
    """Runs all micro-batches through each stage in turn; returns this rank's last output.

    torch's own evaluation does not support the V form. `inputs` are those of the first stage, by
    micro-batch. Collective: sends and receives.
    """
    plan, modules, _, device, group = runtime
    sent: list[dist.Work | None] = []
    outputs: list[Any] = list(inputs)
    for stage, module in modules.items():
        values, outputs = outputs, []
        with _resharded(module):
            for micro_batch in range(plan.num_microbatches):
                if stage == 0 or stage - 1 in modules:
                    value = values[micro_batch]
                else:
                    value = tuple(tensor.detach() for tensor in zeros(boundaries[stage], device))
                    for tensor in value:
                        dist.recv(tensor, group=group, group_src=plan.rank_of(stage - 1))
                module.micro_batch = micro_batch
                result = module(*(value if isinstance(value, tuple) else (value,)))
                outputs.append(result)
                if stage + 1 < plan.num_stages and stage + 1 not in modules:
                    target = plan.rank_of(stage + 1)
                    for tensor in result if isinstance(result, tuple) else (result,):
                        sent.append(dist.isend(tensor, group=group, group_dst=target))
    for work in sent:
        if work is not None:
            work.wait()
    return outputs
