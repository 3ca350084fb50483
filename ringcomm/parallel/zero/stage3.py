"""ZeRO stage 3: sharded weights, gradients and state, with torch's fully_shard."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from ringcomm import torch_names
from ringcomm.backward_pass import OpenPasses
from ringcomm.parallel.flat_collectives import largest_of, local_of
from ringcomm.parallel.gradient_placeholder import hookable, weakly
from ringcomm.parallel.model.refuse import HOOK_AT_STAGE_3
from ringcomm.parallel.model.saving import refuse_moves, refuse_parts, save_full
from ringcomm.parallel.model.units import (
    divide_gradients,
    fsdp_roots,
    refuse_create_graph,
    shard_units,
    tensors_in,
    watch_whole_weights,
    with_own_memory,
)
from ringcomm.parallel.zero.inner import (
    NUM_OPTION_BYTES,
    Given,
    check_options,
    data_was_set,
)
from ringcomm.parallel.zero.optimizer import ZeroOptimizer


class Zero3(ZeroOptimizer):
    """torch's optimizer on the shards of fully_shard; made by zero.shard().

    The root reshards after its forward like every unit, so a step communicates weights twice and
    gradients once. Weights keep their dtype (float32) and are gathered in `param_dtype`; gradients
    are reduced in `reduce_dtype`.

    Hooks, in the order of a step, besides those of fully_shard; roots are the outermost units:

    - forward of a root begins: _forward_begins() checks that no `.data` was set; of the model,
      refuse_ddp() that DistributedDataParallel does not run it
    - forward of any other module with weights begins: _check_gathered() refuses sharded ones
    - forward of a unit begins: watch_whole_weights() puts _mark() on weights that are gathered
      for the first time; a direct call of `unit.forward` goes through hooks (_through_hooks())
    - forward of a unit ends, before fully_shard frees weights: _keep_output() copies outputs in
      their memory
    - forward of a root ends: _watch_outputs() puts _pass_begins() on the outputs' nodes
    - backward reaches an output: _pass_begins() refuses create_graph=True and counts the pass
    - autograd has added to a gathered weight's gradient: _mark() notes that this rank has one
    - fully_shard has reduced it into the sharded weight's: _note_reduced() notes which tensor
    - model.zero_grad() calls this optimizer's, too (_after())
    - state_dict(), save_pretrained(), to(): those of model/saving.py, for parts of weights
    """

    def __init__(self, given: Given) -> None:
        """The ranks of the group are those of the mesh. Collective."""
        model, options = given.model.module, given.options
        # Without one, fully_shard accumulates in float32 too, also if a unit has never run.
        is_mixed = options.param_dtype is not None or options.reduce_dtype is not None
        policy = MixedPrecisionPolicy(options.param_dtype, options.grad_dtype if is_mixed else None)
        fully = {"mp_policy": policy, "reshard_after_forward": True}
        described = shard_units(given.model, given.group, given.mesh, given.units, **fully)
        for own in given.groups:
            places = [given.model.weights[param].places[0] for param in own["params"]]
            before, own["params"] = own["params"], [m.get_parameter(name) for m, name in places]
            for param, made in zip(before, own["params"], strict=True):
                vars(made).update({**vars(param), **vars(made)})
        super().__init__(given._replace(model=described))
        self.inner.place_offloaded()
        self.inner.share_out(
            {
                param: self.group if weight.experts is None else param.device_mesh.get_group()  # type: ignore[attr-defined]
                for param, weight in described.weights.items()
            }
        )
        self._passes: OpenPasses[None] = OpenPasses()
        self._is_in_forward = False  # also after a forward that has raised
        self._awaits_backward = False  # a forward pass has made a graph, and no backward pass began
        self._is_synced = True
        # Weights with a gradient from autograd on this rank since the last step; weights whose
        # gradient no_sync() keeps; and gradients left by fully_shard, which may be zeros.
        self._marked: set[nn.Parameter] = set()
        self._kept: set[nn.Parameter] = set()
        self._reduced: dict[nn.Parameter, Tensor | None] = {}
        named = model.named_parameters()
        self._memory = [(name, param, param.detach()) for name, param in named]
        self._units: list[Any] = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self._roots = fsdp_roots(model)
        self._watch(model)
        self._tell_scale()
        if hasattr(model, "generate"):
            # It calls the encoder of an encoder-decoder model, which uses weights of the root.
            register_fsdp_forward_method(model, "generate")
        refuse_moves(model)
        is_whole = (
            given.mesh is None or torch_names.root_mesh(given.mesh).size() == self.group.size()
        )
        save_full(model, self.group if is_whole else None)
        refuse_parts(model)

    def _watch(self, model: nn.Module) -> None:
        """Installs all hooks; the class's docstring lists them."""
        params = {
            (module, name): param
            for module in model.modules()
            for name, param in module.named_parameters(recurse=False)
        }
        mark, note_reduced = weakly(self._mark), weakly(self._note_reduced)

        def seen(module: nn.Module, name: str, whole: nn.Parameter) -> None:
            whole.register_post_accumulate_grad_hook(partial(mark, params[module, name]))

        for unit in self._units:
            watch_whole_weights(unit, seen)
            # Before fully_shard's hook, which frees the weights.
            unit.register_forward_hook(torch_names.untraced(_keep_output), prepend=True)
        for param in self.all_params():
            with hookable(param):
                param.register_post_accumulate_grad_hook(note_reduced)
        for root in self._roots:
            root.register_forward_pre_hook(torch_names.untraced(weakly(self._forward_begins)))
            root.register_forward_hook(torch_names.untraced(weakly(self._watch_outputs)))
        meshes = {getattr(param, "device_mesh", None) for param in model.parameters()}
        for module in model.modules():
            has_weights = next(module.parameters(recurse=False), None) is not None
            if has_weights and not isinstance(module, FSDPModule):
                module.register_forward_pre_hook(partial(_check_gathered, meshes))
        for unit in self._units:
            unit.forward = _through_hooks(unit)
        model.zero_grad = _after(weakly(self.zero_grad), model.zero_grad)  # type: ignore[method-assign]

    def _mark(self, param: nn.Parameter, _: Tensor) -> None:
        self._marked.add(param)
        if not self._is_synced:
            self._kept.add(param)

    def _note_reduced(self, param: nn.Parameter) -> None:
        self._kept.discard(param)
        self._reduced[param] = param.grad

    @torch_names.untraced
    def _forward_begins(self, *_: Any) -> None:
        self._check_memory()
        self._is_in_forward = True

    def _check_memory(self) -> None:
        """Raises RuntimeError if `param.data = x` has changed a DTensor and not its local part."""
        for name, param, before in self._memory:
            if torch_names.storage_id(before) != torch_names.storage_id(param):
                raise RuntimeError(data_was_set(name))

    @torch_names.untraced
    def _watch_outputs(self, _: nn.Module, __: Any, output: Any) -> None:
        self._is_in_forward = False
        for tensor in tensors_in(output) if torch.is_grad_enabled() else ():
            if tensor.grad_fn is not None:
                self._awaits_backward = True
                tensor.grad_fn.register_prehook(weakly(self._pass_begins))

    def _pass_begins(self, _: tuple[Tensor, ...]) -> None:
        refuse_create_graph("stage 3 of zero.shard()")
        self._awaits_backward = False
        if not self._passes:  # fully_shard adds to gradients that users have set
            self._marked = {p for p in self._marked if p.grad is not None or p in self._kept}
            self._marked.update(filter(self._is_by_user, self.all_params()))
        self._passes.enter()

    @property
    def _grad_scale(self) -> float:
        return 1.0  # see _tell_scale()

    def _tell_scale(self) -> None:
        """Makes fully_shard divide gradients by the loss scale, together with the number of ranks.

        torch.nn.utils.clip_grad_norm_ then sees unscaled gradients.
        """
        for unit in () if self.loss_scaling is None else self._units:
            divide_gradients(unit, self.group, self.loss_scale)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See ZeroOptimizer."""
        loss = super().step(closure)
        self._tell_scale()
        is_unreached, self._awaits_backward = self._awaits_backward, False
        if is_unreached:
            raise RuntimeError(
                "no backward pass has reached the outputs of the model since its forward pass:"
                " backward(inputs=weights) does nothing at stage 3, where gradients belong to"
                " gathered weights. Leave inputs= out, and freeze other weights by requires_grad_()"
            )
        return loss

    def _set_sync(self, is_on: bool) -> None:
        self._is_synced = is_on
        for root in self._roots:
            root.set_requires_gradient_sync(is_on)
        for unit in self._units if is_on else ():
            for params in torch_names.fsdp_params(unit):
                torch_names.fill_accumulated(params)

    def _agree(self) -> bool:
        """Drops zeros that fully_shard has reduced for weights without a gradient on any rank."""
        found, most = dict[nn.Parameter, int](), 0
        options = self.inner.option_bytes(self.param_groups)
        # All ranks last: they learn what is true of some rank's experts.
        for group in self.inner.rank_groups:
            params = [param for param in self.all_params() if self.inner.group_of[param] is group]
            has = [self._has_gradient(param) for param in params]
            facts = largest_of([*options, most, *has], [group], torch.uint8)
            options, facts = facts[:NUM_OPTION_BYTES], facts[NUM_OPTION_BYTES:]
            found |= zip(params, facts[1:], strict=True)
            most = max(facts)
        check_options(options)
        self._awaits_backward &= not most
        if most == 2:
            raise RuntimeError(
                "gradients from no_sync() were not reduced at stage 3: run the last backward"
                " pass before step() outside no_sync(), through the same weights"
            )
        for param, has_any in found.items():
            if not has_any:
                param.grad = None
            elif param.grad is None and param in self.inner.owner_of:
                param.grad = torch.zeros_like(param)  # the owner gets all rows
        return most > 0

    def _has_gradient(self, param: nn.Parameter) -> int:
        """1 if a gradient has arrived on this rank, from autograd or the user; 2 in no_sync()."""
        is_marked = param in self._marked and param.grad is not None
        return 2 if param in self._kept else is_marked or self._is_by_user(param)

    def _is_by_user(self, param: nn.Parameter) -> bool:
        return param.grad is not None and param.grad is not self._reduced.get(param)

    def _shards(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for param in self.all_params():
            if param.grad is not None:
                yield param, local_of(param.grad)

    def _check_unchanged(self) -> None:
        if self._passes:
            raise RuntimeError(
                "a backward pass raised an error at stage 3: call zero_grad() before the next one,"
                " or, before torch 2.13, rebuild the model and its optimizer from a checkpoint"
            )
        if self._is_in_forward:
            # Units that a failed forward has gathered would keep the weights from before the step.
            self._reset_units()
        self._check_memory()
        left = {whole for unit in self._units for whole in torch_names.gathered_weights(unit)}
        for name, param in self._model.named_parameters():
            if param in left:
                raise RuntimeError(
                    f"{name} is still gathered, because several segments of a reentrant checkpoint"
                    " use it, and fully_shard loses gradients of all but one: set"
                    " use_reentrant=False"
                )
        super()._check_unchanged()
        if any(map(torch_names.backward_hooks_of, self.all_params())):
            raise ValueError(f"a weight {HOOK_AT_STAGE_3}")

    def _reset_units(self) -> None:
        """Makes fully_shard ready for the next forward, after an error in a pass."""
        if hasattr(FSDPModule, "reset_iter_state"):  # from torch 2.13 on
            # From 2.15 on it drops gradients, also those of complete passes.
            grads = [(param, param.grad) for param in self.all_params()]
            for root in self._roots:
                with suppress(AttributeError):  # of a root that has never run
                    root.reset_iter_state()
            for param, grad in grads:
                param.grad = grad
            self._is_in_forward = False
            self._passes.forget()

    def _update(self, factor: float) -> None:
        self._step_inner(dict(self._shards()), factor)

    def _forget_gradients(self) -> None:
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, for any `set_to_none`, and those of no_sync() or a failed pass."""
        has_failed = bool(self._passes)
        if has_failed:
            self._reset_units()
        for unit in self._units if has_failed or self._kept else ():
            for params in torch_names.fsdp_params(unit):
                torch_names.drop_accumulated(params)
        self._kept.clear()
        self._marked.clear()
        self._reduced.clear()
        super().zero_grad()

    # ---- state

    def set_state_of(self, param: Any, state: dict[str, Any]) -> None:
        """See ZeroOptimizer."""
        if not self.inner.by_param[param].is_offloaded:
            # "master" of 16-bit weights: the weights themselves.
            state = {key: local_of(value) for key, value in state.items() if key != "master"}
        super().set_state_of(param, state)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """See ZeroOptimizer."""
        yield
        self._tell_scale()  # which has been loaded too


def _through_hooks(module: nn.Module) -> Callable[..., Any]:
    """A unit's forward that gathers the weights also where a model calls it by its name."""
    run = module.forward

    @wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch_names.is_gathered(module):
            return run(*args, **kwargs)
        return module(*args, **kwargs)

    return forward


def _after(first: Callable[[], Any], zero_grad: Callable[[bool], None]) -> Callable[..., None]:
    """A model's zero_grad() that drops gradients of gathered weights, too."""

    def both(set_to_none: bool = True) -> None:
        first()
        zero_grad(set_to_none)

    return both


def _check_gathered(meshes: set[Any], module: nn.Module, _: Any) -> None:
    """Raises RuntimeError if a layer is called outside of the forward pass of its unit.

    With torch's tensor parallelism gathered weights are DTensors too, of other meshes.
    """
    own: Any = () if torch.compiler.is_compiling() else module.parameters(recurse=False)
    for param in own:
        if isinstance(param, DTensor) and param.device_mesh in meshes:
            raise RuntimeError(
                f"the weights of this {type(module).__name__} are sharded outside of the model's"
                " forward pass: call the whole model. A method beside forward gathers them after"
                " torch.distributed.fsdp.register_fsdp_forward_method(model, its name)"
            )


def _keep_output(module: nn.Module, _: Any, output: Any) -> Any:
    return with_own_memory(output, map(local_of, torch_names.gathered_weights(module)))
