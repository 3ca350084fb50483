"""Makes the backend's name known to torch.distributed, without importing ringcomm.

torch calls register() at the end of `import torch` (entry point group `torch.backends`). An
exception here would break `import torch`, and an import of ringcomm would slow it down and find
torch half initialized. This module therefore imports only torch.distributed, and registers a
creator that imports the rest when a group is made.

RINGCOMM_AS_GLOO=1 gives programs that name "gloo", or no backend, ringcomm for CPU tensors.
"""

import functools
import inspect
import logging
import os
import re
import sys
import warnings
from typing import Any

# The process that imported torch. A child that it forks has inherited torch without its threads.
PID = os.getpid()


def _create(dist_backend_opts: Any, pg_options: Any) -> Any:
    from ringcomm.backend import create

    return create(dist_backend_opts, pg_options)


def register() -> None:
    """Registers "ringcomm" for CPU and CUDA tensors; never raises, may be called again."""
    try:
        import torch.distributed as dist

        if not dist.is_available() or "ringcomm" in dist.Backend.backend_list:
            return
        # A list: torch iterates over `devices`, and a string would be taken letter by letter.
        dist.Backend.register_backend(
            "ringcomm", _create, extended_api=True, devices=["cpu", "cuda"]
        )
        if (os.environ.get("RINGCOMM_AS_GLOO") or "0") != "0":
            _serve_gloo(dist.distributed_c10d)
        if sys.version_info >= (3, 11):
            from torch.distributed.c10d_logger import _c10d_logger

            _c10d_logger.addHandler(_Advice())
    except Exception as error:
        warnings.warn(
            f"ringcomm could not register with torch.distributed: {error!r}", stacklevel=2
        )


class _Advice(logging.Handler):
    """Adds advice to errors that torch raises before ringcomm is called.

    torch logs every error of its distributed calls while it passes them on. The error keeps its
    type and message; the advice is a note, which tracebacks print after it (Python >= 3.11).
    """

    # Of errors: their type, words of their message, and what to do.
    KNOWN = (
        (
            "ValueError",
            "using env:// rendezvous: environment variable",
            "start the script on 2 ranks with: torchrun --nproc-per-node 2 SCRIPT",
        ),
        (
            "DistStoreError",
            "Permission denied",
            "give the store a file in a folder that all ranks can write",
        ),
        (
            "DistStoreError",
            "waiting for clients",
            "not all ranks have called init_process_group; the errors of the others name them, and "
            "with torchrun all errors do",
        ),
        (
            "RuntimeError",
            "No backend type associated with device type",
            "name a backend for each device, or use init_process_group('ringcomm'), "
            "which serves CPU and CUDA tensors",
        ),
    )

    def emit(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        advice = [
            what_to_do
            for name, words, what_to_do in self.KNOWN
            if type(error).__name__ == name and words in str(error)
        ]
        if _means_ringcomm(str(error)):
            advice.append("did you mean the backend 'ringcomm'?")
        for note in (f"ringcomm: {what_to_do}" for what_to_do in advice):
            if note not in getattr(error, "__notes__", []):  # of a call within this one
                error.add_note(note)  # type: ignore[union-attr]


def _means_ringcomm(text: str) -> bool:
    """Whether torch says that it has no backend of some name, and "ringcomm" is the closest."""
    found = re.match(r"Unknown (?:c10d )?backend (?:type )?'?(\w+)", text)
    if found is None:
        return False
    import difflib

    import torch.distributed as dist

    return difflib.get_close_matches(found[1].lower(), dist.Backend.backend_list, 1) == ["ringcomm"]


def _serve_gloo(c10d: Any) -> None:
    """Makes groups for CPU tensors that request Gloo use ringcomm.

    Patches the private function of torch that makes all groups: other modules have imported the
    public ones by name before this module runs. Groups still report "gloo" as their backend.
    ringcomm's own messages between hosts come from the class ProcessGroupGloo, and stay Gloo's.
    Another value than 1 is an error of the first such group: `import torch` must not fail.
    """
    make_group = c10d._new_process_group_helper
    signature = inspect.signature(make_group)

    @functools.wraps(make_group)
    def make(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        asked = call.arguments["backend"]
        served = _in_place_of(str(asked).lower())
        if served is None:
            return make_group(*args, **kwargs)
        from ringcomm.as_gloo import add_names, say_once
        from ringcomm.options import flag

        if not flag("RINGCOMM_AS_GLOO", os.environ.get("RINGCOMM_AS_GLOO") or "0"):
            return make_group(*args, **kwargs)
        add_names()
        call.arguments["backend"] = served
        call.arguments.pop("backend_options", None)  # of Gloo, which ignores them
        group, store = make_group(*call.args, **call.kwargs)
        if store is not None:
            c10d._world.pg_map[group] = (asked, store)
            if group.rank() == 0:
                say_once()
        return group, store

    c10d._new_process_group_helper = make
    if not hasattr(c10d, "set_timeout"):  # before torch 2.14
        _set_timeout_of_any(c10d)


def _set_timeout_of_any(c10d: Any) -> None:
    """Makes c10d._set_pg_timeout set the timeout of every backend, as that of torch 2.14 does.

    Before, it asks for the classes of Gloo and NCCL, and only warns about other backends.
    """
    of_known = c10d._set_pg_timeout

    @functools.wraps(of_known)
    def set_timeout(timeout: Any, group: Any = None) -> None:
        group = c10d._get_default_group() if group is None else group
        if c10d._rank_not_in_group(group):
            of_known(timeout, group)  # raises
        group.set_timeout(timeout)

    c10d._set_pg_timeout = set_timeout


def _in_place_of(asked: str) -> str | None:
    """The backends to use instead of the requested ones; None if no CPU backend is Gloo."""
    import torch

    if asked == "undefined":  # torch takes the accelerator's backend, Gloo where there is none
        return "ringcomm" if torch.accelerator.current_accelerator(True) is None else None
    if asked == "gloo":  # which takes the CUDA tensors of a machine with GPUs
        return "cpu:ringcomm,cuda:gloo" if torch.cuda.device_count() else "ringcomm"
    pairs = asked.replace(" ", "").split(",")
    served = ["cpu:ringcomm" if pair == "cpu:gloo" else pair for pair in pairs]
    return ",".join(served) if served != pairs else None
