"""The options of a group; docs/reference/environment.md lists all environment variables."""

import difflib
import functools
import os
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, Literal

# Read by csrc/, losses, recordings and the build; each of the others stands for a field of Options.
_OTHER_VARIABLES = (
    *("RINGCOMM_AS_GLOO", "RINGCOMM_TIMEOUT", "RINGCOMM_HOST_ID"),
    *("RINGCOMM_SIMD", "RINGCOMM_CHECK_TARGETS", "RINGCOMM_MAP_TENSORS"),
    *("RINGCOMM_CUDA", "RINGCOMM_CUDA_ARCHS", "RINGCOMM_CUDA_DRIVER", "RINGCOMM_CUDA_IMAGE"),
    *("RINGCOMM_TRACE", "RINGCOMM_TRACE_EVENTS", "RINGCOMM_FLIGHT_DUMP"),
    *("RINGCOMM_PREBUILT", "RINGCOMM_USE_ENV", "RINGCOMM_TORCH", "RINGCOMM_TORCH_INDEX"),
    *("RINGCOMM_MAX_JOBS", "RINGCOMM_WERROR"),
)
# Read by make, the tests and their emulator, whose groups give no warning of them.
_OF_TESTS = (
    *("RINGCOMM_ALL_KERNELS", "RINGCOMM_BARE", "RINGCOMM_COMPARE"),
    *("RINGCOMM_DEATHS", "RINGCOMM_FAULTS", "RINGCOMM_HOSTS_ROUNDS"),
    "RINGCOMM_WRITE_SHOW",
    *("RINGCOMM_LOOP", "RINGCOMM_LOOPS_SECONDS", "RINGCOMM_LOOPS_SEED"),
    *("RINGCOMM_SEQUENCE", "RINGCOMM_SEQUENCES", "RINGCOMM_SEQUENCE_SEED"),
    *("RINGCOMM_SOAK_SECONDS", "RINGCOMM_SOAK_SEED", "RINGCOMM_SOAK_GENERATION"),
)
# The values of options that have few.
_CHOICES: dict[str, tuple[Any, ...]] = {
    "algorithm": ("auto", "one_shot", "two_shot", "ring"),
    "deterministic": (None, "rank_order"),
    "transport": (None, "shm", "messages"),
}
_OF_EMULATOR, _OF_TEST_RANKS = "RINGCOMM_EMULATOR_", "RINGCOMM_TEST_"


@dataclass(frozen=True)
class Options:
    """Options of a group: `dist.init_process_group("ringcomm", pg_options=ringcomm.Options(...))`.

    All ranks must have the same options, except the last two. They are
    compared when the group is made, and a difference raises MismatchError on every rank. A field
    that is left at its default is taken from the environment variable RINGCOMM_<FIELD>, if that is
    set.

    Attributes:
        algorithm: the algorithm of all_reduce. "auto" selects by size and number of ranks; on
            several hosts it reduces inside each host first. "one_shot", "two_shot" and "ring" run
            over all ranks, on several hosts over messages. Tensors on a GPU may use two_shot
            instead, and over another backend that backend's own, unless it is "ring".
            ringcomm.stats() reports which algorithms ran.
        deterministic: with "rank_order" every reduction equals the left-to-right sum over the ranks
            bitwise, for every algorithm, size and transport; a reduction of tensors on a device
            that goes over another backend raises ValueError. With None results are bitwise equal on
            all ranks, and in every run with the same options.
        transport: "shm" (shared memory, for ranks on one host) or "messages" (the message
            transport: the point-to-point calls of another backend). None uses shared memory inside
            each host, and messages between hosts.
        message_backend: the backend of the message transport: "gloo", or another one registered
            with torch.distributed that supports CPU tensors, whose receives may be longer than
            their messages. For tensors of a device that it supports, it must have all
            collectives but gather and scatter.
        tuning: the path of a file of `ringcomm tune`, whose sizes select the algorithm.
        max_threads: how many of torch's threads copy and sum in a call that moves 256 KiB or more,
            1 or more. None uses all, if each has a core to itself, and one otherwise. Results do
            not depend on it.
        log_waits: whether a rank that has waited for 10, 60 and 300 s in a call writes a line to
            stderr that names the call and the rank that it waits for.
    """

    algorithm: Literal["auto", "one_shot", "two_shot", "ring"] = "auto"
    deterministic: Literal["rank_order"] | None = None
    transport: Literal["shm", "messages"] | None = None
    message_backend: str = "gloo"
    tuning: str | None = None
    max_threads: int | None = None
    log_waits: bool = True

    def __new__(cls, *values: Any, **options: Any) -> "Options":
        """Checks the names, which a dataclass would refuse without the nearest one."""
        check_names("ringcomm.Options", options, [field.name for field in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Raises ValueError for a value that an option does not have."""
        for name, choices in _CHOICES.items():
            if (got := getattr(self, name)) not in choices:
                known = " or ".join(str(choice) for choice in choices if choice is not None)
                known = known.replace(" or ", ", ", known.count(" or ") - 1)
                raise ValueError(
                    f"{name} of ringcomm.Options, or RINGCOMM_{name.upper()}, must be {known},"
                    f" got {got!r}"
                )
        got = self.max_threads
        if got is not None and (isinstance(got, bool) or not isinstance(got, int) or got < 1):
            raise ValueError(
                "max_threads of ringcomm.Options, or RINGCOMM_MAX_THREADS, must be None or a whole"
                f" number from 1 on, got {got!r}"
            )

    def with_environment(self) -> "Options":
        """A copy in which environment variables replace fields that have their default."""
        found: dict[str, Any] = {}
        for field in fields(self):
            name = f"RINGCOMM_{field.name.upper()}"
            text = os.environ.get(name)
            if not text or getattr(self, field.name) != field.default:
                continue
            is_number = field.name == "max_threads" and text.isdecimal()
            is_flag = field.type in (bool, "bool")
            found[field.name] = flag(name, text) if is_flag else int(text) if is_number else text
        return replace(self, **found)


def check_names(owner: str, given: Iterable[str], known: Collection[str], why: str = "") -> None:
    """Raises TypeError for an option that `owner` does not have, with the nearest that it has."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise TypeError(f"{owner} has no option {name!r}{why}; {hint}")


def flag(name: str, text: str) -> bool:
    """The value of an environment variable that is 0 or 1; raises ValueError for others."""
    if text not in ("0", "1"):
        raise ValueError(f"the environment variable {name} must be 0 or 1, got {text!r}")
    return text == "1"


def timeout_of(asked: timedelta) -> timedelta:
    """The timeout of a group whose program asks for `asked`: RINGCOMM_TIMEOUT seconds, if set.

    Raises ValueError unless the variable is a number of seconds, at least 0.001.
    """
    text = os.environ.get("RINGCOMM_TIMEOUT")
    if not text:
        return asked
    try:
        seconds = float(text)
        if seconds >= 0.001:
            return timedelta(seconds=seconds)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"RINGCOMM_TIMEOUT must be a number of seconds such as 60, got {text!r}")


def known_variables() -> set[str]:
    """The names of all environment variables of ringcomm that users may set."""
    return {f"RINGCOMM_{field.name.upper()}" for field in fields(Options)} | {*_OTHER_VARIABLES}


def unknown_variables() -> dict[str, str | None]:
    """The names of set variables that look like ringcomm's and are not: what each may mean."""
    known = known_variables()
    found: dict[str, str | None] = {}
    for name in sorted(os.environ.keys() - known - {*_OF_TESTS}):
        if name.startswith("RINGCOMM_") and not name.startswith((_OF_EMULATOR, _OF_TEST_RANKS)):
            own = {other.removeprefix("RINGCOMM_"): other for other in sorted(known)}
            near = difflib.get_close_matches(name.removeprefix("RINGCOMM_"), own, 1)
            found[name] = own[near[0]] if near else None
    return found


@functools.cache
def warn_of_unknown_variables() -> None:
    """Warns once per process of each variable that looks like ringcomm's and is not."""
    for name, near in unknown_variables().items():
        hint = f"did you mean {near}?" if near else "docs/reference/environment.md lists them"
        warnings.warn(
            f"the environment variable {name} is set, but ringcomm has none of that name; {hint}",
            stacklevel=2,
        )


def checks_targets() -> bool:
    """Whether losses on a GPU wait for the device to check that every target is a class."""
    return flag("RINGCOMM_CHECK_TARGETS", os.environ.get("RINGCOMM_CHECK_TARGETS") or "0")
