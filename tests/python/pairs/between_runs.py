"""A case of the tables of whole loops on ranks: what happens between steps, and how ranks leave."""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import between_engines
import torch
import torch.distributed as dist
from between_model import ACTION_STEP, STEPS, VOCABULARY, Alone, make_model, probe, use
from pair_model import local_of
from pair_table import Case
from program_model import PREFIXES, default_dtype
from ranks import end_groups
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from ringcomm.parallel import get_state_dict

TIMEOUT = datetime.timedelta(seconds=10)
READS = ("eval", "input gradient", "generate", "state_dict")  # changes nothing


class Outcome(NamedTuple):
    """What a rank has seen of a case.

    Attributes:
        kind, text: of what was raised; empty if nothing was.
        is_unchanged: no weight was written in the call that raised.
        seen: by name what a loop sees besides weights: losses, tokens, gradients, states.
        weights: whole weights at the end.
        local, replica: this rank's own, and which ranks have the same.
        data_rank: of this rank.
    """

    kind: str = ""
    text: str = ""
    is_unchanged: bool = False
    seen: dict[str, Any] = {}  # noqa: RUF012
    weights: dict[str, Tensor] = {}  # noqa: RUF012
    local: list[Tensor] = []  # noqa: RUF012
    replica: tuple[int, ...] = ()
    data_rank: int = 0


def outcome(rank: int, case: Case, folder: Path) -> Outcome:
    """Trains a case in a group of its own."""
    num_ranks = between_engines.world_size(case)
    backend = case.get("backend", "ringcomm")
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    try:
        if backend == "gloo":  # a rank that ends would break what another still connects
            dist.barrier()
        with default_dtype(getattr(torch, case.get("default dtype", "float32"))):
            found = train(rank, case, folder)
        if case.get("leaving") == "one by one" and not found.kind:
            _leave(rank, num_ranks, found, folder)
        return found
    finally:
        end_groups()


def train(rank: int, case: Case, folder: Path) -> Outcome:
    seed = rank if case.get("seeds") == "per rank" else 0
    engine: Any = None
    before: list[Tensor] = []
    seen: dict[str, Any] = {}
    try:
        engine = between_engines.engine_of(case, seed, folder)
        loop = Loop(engine, case)
        for step in range(STEPS):
            before = engine.snapshot()
            seen |= loop.between(step)
            engine = loop.engine
            before = engine.snapshot()
            engine.step(step)
            loop.after_step()
        before = []
        seen |= loop.at_end()
        weights = get_state_dict(engine.owner, full=True)[0]
        weights = {PREFIXES.sub("", name): value for name, value in weights.items()}
    except Exception as error:
        after = engine.snapshot() if engine is not None and before else []
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        return Outcome(type(error).__name__, str(error), same)
    is_apart = case.get("system") == "infinity"  # weights are in files or host memory
    local = [] if is_apart else [local_of(param).clone() for param in engine.params]
    return Outcome("", "", False, seen, weights, local, engine.replica(), engine.data_rank)


def _leave(rank: int, num_ranks: int, found: Outcome, folder: Path) -> None:
    """Every rank but 0 ends right after its last call, without a word."""
    last = dist.new_group()
    if rank == 0:
        time.sleep(0.05)
        for peer in range(1, num_ranks):
            value = torch.zeros(1)
            dist.recv(value, peer, group=last)
            assert float(value) == peer
        return
    (folder / f"rank{rank}").write_bytes(pickle.dumps(found))
    dist.send(torch.tensor([float(rank)]), 0, group=last)
    os._exit(0)


def expected(case: Case) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """By data rank what it should see, and the weights; one process."""
    num_data = between_engines.num_data_ranks(case)
    engine = Alone(case, num_data, between_engines.num_parts(case))
    loop = Loop(engine, case)
    seen: list[dict[str, Any]] = [{} for _ in range(num_data)]
    reads = case.get("between steps", "none") in READS

    def by_rank(call: Callable[[], dict[str, Any]], is_each: bool) -> None:
        """What each rank sees with its own buffers; what changes something is done once."""
        shared = None if is_each else call()
        for rank in range(num_data):
            with engine.as_rank(rank):
                seen[rank] |= call() if shared is None else shared
        key = "loss in evaluation"
        if between_engines.dims_of(case) is not None and key in seen[0]:
            mean = sum(of_rank[key] for of_rank in seen) / num_data  # as evaluate() gives
            for of_rank in seen:
                of_rank[key] = mean

    for step in range(STEPS):
        by_rank(lambda step=step: loop.between(step), reads)  # type: ignore[misc]
        engine.step(step)
        loop.after_step()
    by_rank(loop.at_end, True)
    weights = {name: p.detach().float() for name, p in engine.model.named_parameters()}
    return [(of_rank, weights) for of_rank in seen]


def initial(case: Case) -> dict[str, Tensor]:
    """The weights before the first step."""
    return {name: param.detach() for name, param in make_model(case, 0).named_parameters()}


class Loop:
    """What a user does around the steps of an engine."""

    def __init__(self, engine: Any, case: Case) -> None:
        self.engine, self.case = engine, case
        self.average: AveragedModel | None = None
        self.is_frozen = False

    def between(self, step: int) -> dict[str, Any]:
        """Before a step."""
        if step == 1 and self.case.get("trained") == "thawed":
            self.engine.thaw()
        first = self.case.get("first forward", "training")
        if step == 0 and first != "training":
            mode = torch.no_grad() if first == "no_grad" else torch.inference_mode()
            with evaluating(self.engine.model), mode:
                return {"loss before the first step": self.engine.evaluate()}
        action = self.case.get("between steps", "none")
        if step == ACTION_STEP + 1 and self.is_frozen:
            self._freeze(False)
        if step != ACTION_STEP or action == "none":
            return {}
        found: dict[str, Any] = getattr(self, "_" + action.replace(" ", "_"))() or {}
        return found

    def after_step(self) -> None:
        if self.average is not None:
            self.average.update_parameters(self.engine.model)

    def at_end(self) -> dict[str, Any]:
        """After the last step."""
        seen: dict[str, Any] = {}
        if self.average is not None:
            seen["average"] = weights_of(self.average.module)
        with evaluating(self.engine.model):
            seen["loss in evaluation"] = self.engine.evaluate()
        if between_engines.dims_of(self.case) is not None:
            seen["losses of step()"] = self.engine.losses
        return seen

    def _eval(self) -> dict[str, Any]:
        with evaluating(self.engine.model):
            return {"loss in evaluation": self.engine.evaluate()}

    def _input_gradient(self) -> dict[str, Any]:
        model: Any = self.engine.model
        use(self.case, ACTION_STEP, 0)
        grads: list[Tensor] = []
        with evaluating(model):
            for _ in range(2):
                generator = torch.Generator().manual_seed(5)
                size = (*probe().shape, model.config.hidden_size)
                x = torch.randn(size, generator=generator, requires_grad=True)
                given = x.double() if isinstance(self.engine, Alone) else x
                loss = model(inputs_embeds=given, labels=probe()).loss
                if not grads:
                    grads.append(torch.autograd.grad(loss, x)[0])
                else:
                    loss.backward(inputs=[x])
                    assert x.grad is not None
                    grads.append(x.grad)
        return {"gradients of inputs": grads}

    def _deepcopy(self) -> None:
        self.average = AveragedModel(self.engine.model)

    def _generate(self) -> dict[str, Any]:
        use(self.case, ACTION_STEP, 0)
        model: Any = self.engine.model
        with evaluating(model), torch.no_grad():
            prompt = probe()[:, :3]
            tokens = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert int(tokens.max()) < VOCABULARY
        return {"tokens": tokens}

    def _state_dict(self) -> dict[str, Any]:
        return {"state_dict()": states_of(self.engine.model)}

    def _exception_in_forward(self) -> None:
        def fail(*_: Any) -> None:
            raise ValueError("an error of the user's")

        handle = self.engine.hooked()[-1].register_forward_pre_hook(fail)
        self._step_that_fails(handle)

    def _exception_in_backward(self) -> None:
        def fail(_: Tensor) -> None:
            raise ValueError("an error of the user's")

        def of_output(_: nn.Module, __: Any, output: Tensor) -> None:
            output.register_hook(fail)  # the backward pass has gone through the last layer then

        handle = self.engine.hooked()[0].register_forward_hook(of_output)
        self._step_that_fails(handle)

    def _step_that_fails(self, handle: Any) -> None:
        try:
            self.engine.step(ACTION_STEP)
        except ValueError as error:
            if "an error of the user's" not in str(error) or not self.engine.is_whole:
                raise
        else:
            raise AssertionError("the user's error was lost")
        finally:
            handle.remove()

    def _save_and_load(self) -> None:
        self.engine = self.engine.reloaded()

    def _freeze(self, is_frozen: bool = True) -> None:
        self.is_frozen = is_frozen
        for param in self.engine.hooked()[0].parameters():
            param.requires_grad_(not is_frozen)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode."""
    model.eval()
    try:
        yield
    finally:
        model.train()


def states_of(model: nn.Module) -> dict[str, Tensor]:
    """A model's state_dict() as plain tensors. Collective with DTensors."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    }


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A model's weights as plain tensors. Collective with DTensors."""
    weights = {name for name, _ in model.named_parameters()}
    return {name: value for name, value in states_of(model).items() if name in weights}
