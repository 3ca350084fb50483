"""What can be chosen when a group is made."""

from dataclasses import dataclass, fields, replace
from typing import Literal

from ringcomm import env

__all__ = ["Options"]

AlgorithmName = Literal["auto", "one_shot", "two_shot", "ring"]
TransportName = Literal["shm", "p2p"]


@dataclass(frozen=True)
class Options:
    """Options of a group: `dist.init_process_group("ringcomm", pg_options=ringcomm.Options(...))`.

    They are compared between the ranks when the group is made; a difference raises MismatchError on
    every rank. Where a field is left at its default, the environment variable RINGCOMM_<FIELD>
    decides if it is set.

    Attributes:
        algorithm: of all_reduce. "auto" chooses by size and number of ranks, and on several hosts
            goes host by host. Any other runs over all ranks alike, on several hosts over messages;
            tensors of a GPU may take two_shot instead. ringcomm.stats() reports what ran.
        deterministic: "rank_order" makes every reduction equal to the left-to-right one over the
            ranks, to the last bit, whatever the algorithm, size and transport. None: equal on all
            ranks, and from run to run with the same options.
        num_slots: slots of a ring link, 2 to 64.
        slot_bytes: bytes of a slot, a multiple of 64. None takes 262144, or 1 MiB over messages.
        transport: "shm" (ranks on one host), "p2p" (messages of another backend of
            torch.distributed). None takes what reaches all ranks best.
        p2p_backend: what carries those messages: "gloo", or the name of another backend registered
            with torch.distributed that moves CPU tensors.
        tuning: a file that `ringcomm tune` has written; its cross-over between algorithms is taken.
    """

    algorithm: AlgorithmName = "auto"
    deterministic: Literal["rank_order"] | None = None
    num_slots: int = 2
    slot_bytes: int | None = None
    transport: TransportName | None = None
    p2p_backend: str = "gloo"
    tuning: str | None = None

    def with_environment(self) -> "Options":
        """The same, with environment variables in place of what was left at its default.

        Raises:
            ValueError: a variable has no valid form.
        """
        found = {
            field.name: value
            for field in fields(self)
            if getattr(self, field.name) == field.default
            and (value := env.option(field.name)) is not None
        }
        return replace(self, **found)  # type: ignore[arg-type]
