"""Gradients go into buckets when autograd makes them; stage 2 reduces them in the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from ringcomm.parallel.flat_collectives import device_of
from ringcomm.parallel.gradient_placeholder import GradientPlaceholder
from ringcomm.parallel.zero.bucket import Bucket

_MESSAGE = (
    "param.grad of a weight that zero.shard() has sharded has no values; gradients are in the"
    " optimizer. Use optimizer.clip_grad_norm_() in place of torch.nn.utils.clip_grad_norm_, the"
    " option loss_scale= in place of torch.amp.GradScaler, optimizer.statistics() to look at"
    " gradients, and no DistributedDataParallel"
)


class GradientTaker(Protocol):
    """Who has the gradients in place of `param.grad`."""

    def take_gradient(self, param: nn.Parameter, grad: Tensor) -> None:
        """A gradient to be added to what is there; called without autograd."""

    def drop_gradient(self, param: nn.Parameter) -> None:
        """The user has set `param.grad` to None, or nothing has come yet."""


class GradientHooks:
    """Gives each gradient to `taker` when autograd has made it, and leaves a GradientPlaceholder.

    The taker and the hooks live as long as the taker: they refer to it weakly. Gradients of `late`
    parameters are ordinary ones until collect(), since somebody adds to them behind autograd.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        taker: GradientTaker,
        late: Collection[nn.Parameter] = (),
    ) -> None:
        self._taker = weakref.ref(taker)
        self._late = list(late)
        self._placeholders = {p: GradientPlaceholder(p, _MESSAGE) for p in params if p not in late}
        # They are kept, since autograd would make others, without hooks, for the next graph.
        self.nodes = {param: get_gradient_edge(param).node for param in self._placeholders}
        told = weakref.ref(self)
        handles: list[Any] = []
        for param, node in self.nodes.items():
            handles.append(node.register_prehook(_before(told, weakref.ref(param))))
            handles.append(param.register_post_accumulate_grad_hook(_after(told)))
        weakref.finalize(self, remove_hooks, handles)

    def before(self, param: nn.Parameter) -> None:
        """Makes `param.grad` ready for autograd to add to it."""
        if isinstance(param.grad, GradientPlaceholder):
            param.grad = None
        elif (taker := self._taker()) is not None:  # None or another gradient, by the user
            taker.drop_gradient(param)

    def after(self, param: nn.Parameter) -> None:
        """Takes what autograd has left."""
        if (taker := self._taker()) is not None and param.grad is not None:
            with torch.no_grad():
                taker.take_gradient(param, param.grad)
            param.grad = self._placeholders[param]

    def collect(self) -> None:
        """Takes what users have put in place of gradients, and drops what they set to None."""
        for param in self._placeholders:
            if not isinstance(param.grad, GradientPlaceholder):
                self.before(param)
                self.after(param)
        taker = self._taker()
        for param in self._late:
            if taker is not None and param.grad is not None:
                taker.take_gradient(param, param.grad)
                param.grad = None


def _before(
    told: weakref.ref[GradientHooks], of_param: weakref.ref[nn.Parameter]
) -> Callable[[Any], None]:
    def before(_: Any) -> None:
        hooks, param = told(), of_param()
        if hooks is not None and param is not None:
            hooks.before(param)

    return before


def _after(told: weakref.ref[GradientHooks]) -> Callable[[Tensor], None]:
    def arrived(param: Any) -> None:
        if (hooks := told()) is not None:
            hooks.after(param)

    return arrived


def remove_hooks(handles: list[Any]) -> None:
    """Removes hooks."""
    for handle in handles:
        handle.remove()


class BackwardPasses:
    """Takes the gradients of buckets' weights.

    With `reduces` each backward pass reduces every bucket once, in one order on all ranks, whatever
    has a gradient: ranks that leave out different weights still make the same calls. A bucket is
    reduced inside of the pass when the pass has brought all of its weights, or when a gradient of a
    later bucket comes and the pass will not reach those that are left; the others at the end of the
    pass. A gradient that comes after its bucket was reduced waits in the bucket's buffer for the
    next pass, or for the step, where the ranks agree on the buckets with such gradients. So do
    gradients of `late` weights, see GradientHooks, and of passes without `reduces`.

    Ranks may make different numbers of passes, and a pass may reach no weight. A rank announces
    each pass that reduces, and a rank in agree() takes part in it.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        late: Collection[nn.Parameter],
        *,
        reduces: bool,
    ) -> None:
        self._buckets, self._group, self.reduces = buckets, group, reduces
        self._has_begun = False
        self._index = {param: i for i, bucket in enumerate(buckets) for param in bucket.params}
        self.hooks = GradientHooks(self._index, self, late)
        # The bucket that is to be reduced next.
        self._next = 0
        # By bucket, the weights that the pass has not brought yet.
        self._left: list[set[nn.Parameter]] = [set(bucket.params) for bucket in buckets]
        # Graph tasks that call _task_ended().
        self._tasks: set[int] = set()
        # A weight that the next bucket waits for, in a graph task.
        self._expected: tuple[int, nn.Parameter] | None = None
        self._outer_hooks: list[Any] = []

    # ---- by weight

    def take_gradient(self, param: nn.Parameter, grad: Tensor) -> None:
        """See GradientTaker. In a backward pass collective with `reduces`."""
        idx = self._index[param]
        is_in_pass = self.reduces and torch._C._current_graph_task_id() != -1
        if is_in_pass:
            if not self._has_begun:
                self._has_begun = True
                self._largest_facts(is_pass=True)
            self._watch()
            self._pass_over(idx)
        self._buckets[idx].take(param, grad)
        if is_in_pass:
            self._left[idx].discard(param)
            while self._next < len(self._buckets) and not self._left[self._next]:
                self._reduce_next()

    def drop_gradient(self, param: nn.Parameter) -> None:
        """See GradientTaker."""
        self._buckets[self._index[param]].drop(param)

    # ---- what all ranks know

    def agree(self) -> tuple[set[nn.Parameter], list[Bucket]]:
        """The weights with a gradient on any rank, and the buckets with one that is not reduced.

        Collective: one MAX all_reduce, and each backward pass that only other ranks make.
        """
        found = self._largest_facts(is_pass=False)
        while found[0]:
            self._reduce_rest()
            self.forget()
            found = self._largest_facts(is_pass=False)
        _, *by_weight = found
        by_bucket = by_weight[len(self._index) :]
        present = {param for param, has in zip(self._index, by_weight, strict=False) if has}
        return present, [b for b, is_due in zip(self._buckets, by_bucket, strict=True) if is_due]

    def _largest_facts(self, *, is_pass: bool) -> list[int]:
        """Of all ranks: whether a pass begins, weights with a gradient, and fresh buckets."""
        mine = [int(is_pass)]
        mine += [self._buckets[i].has_gradient(param) for param, i in self._index.items()]
        mine += [bucket.is_fresh for bucket in self._buckets]
        facts = torch.tensor(mine, dtype=torch.uint8, device=device_of(self._group))
        dist.all_reduce(facts, dist.ReduceOp.MAX, group=self._group)
        found: list[int] = facts.tolist()
        return found

    # ---- by pass

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.reduce()
        bucket.free_buffer()

    def _reduce_rest(self) -> None:
        while self._next < len(self._buckets):
            self._reduce_next()

    def _pass_over(self, idx: int) -> None:
        """Reduces the buckets before `idx` that get no more gradients in this graph task."""
        task = torch._C._current_graph_task_id()
        while self._next < idx:
            left, expected = self._left[self._next], self._expected
            if expected and expected[0] == task and expected[1] in left:
                return
            for param in left:
                node = self.hooks.nodes.get(param)
                if node is not None and torch._C._will_engine_execute_node(node):
                    self._expected = task, param
                    return
            self._reduce_next()

    def _watch(self) -> None:
        """Has the engine call _task_ended() at the end of the graph task that is under way."""
        task = torch._C._current_graph_task_id()
        if task in self._tasks:
            return
        self._tasks.add(task)
        told = weakref.ref(self)

        def task_ended() -> None:
            if (found := told()) is not None:
                found._task_ended()

        Variable._execution_engine.queue_callback(task_ended)

    def _task_ended(self) -> None:
        """The end of a backward pass, or of one inside of another: a reentrant checkpoint's."""
        outer: Any = torch._C._current_autograd_node()
        if outer is None:
            with torch.no_grad():
                self._reduce_rest()
            self.forget()
            return
        # A node of the outer task has run this one. Nodes behind it run in that task.
        told = weakref.ref(self)

        def outer_runs(_: Any) -> None:
            if (found := told()) is not None:
                found._watch()

        for node, _ in outer.next_functions:
            if node is not None:
                self._outer_hooks.append(node.register_prehook(outer_runs))

    def forget(self) -> None:
        """Waits for a new pass; of one that an error has ended nothing is left."""
        remove_hooks(self._outer_hooks)
        self._outer_hooks = []
        self._next = 0
        self._has_begun = False
        self._left = [set(bucket.params) for bucket in self._buckets]
        self._tasks.clear()
        self._expected = None
