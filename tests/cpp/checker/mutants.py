"""What run_mutants.py breaks in csrc/core, and as what the checker must see it."""

import dataclasses

NO_OWNER = "--no-owner"  # happens-before, data and progress only, not whose turn a slot is


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of the checker: `expected` is a kind of violation, or "ok" if it can see none."""

    scenario: str
    expected: str
    flags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Mutant:
    """Of the protocols: a replacement in a header of csrc/core, and runs of the checker."""

    name: str
    header: str
    old: str
    new: str
    runs: tuple[Run, ...]


STORE = "  arch.store_seq_cst(cursor.value, value);\n"
LOOK = "  wake_sleepers(arch, cursor);\n"
LAST_WORD = "    if (arch.load_acquire(cursor.value) >= target) return WaitStatus::kNone;\n"
GIVE_UP = "    if (stop != WaitStatus::kNone) return stop;\n"
SLEEP = "    // Store (sleepers) then load"
ANNOUNCE = "    arch.add_seq_cst(cursor.sleepers, 1);\n"
LOOK_AGAIN = "    const std::uint64_t seen = arch.load_seq_cst(cursor.value);\n"
RECEIVED = "from.wait(received); stop != WaitStatus::kNone) return stop;\n"
OPEN_WAIT = "region = geometry_.region(rank_, phase_);\n    return wait_all();"
OPEN_ALL = "cursor_of(peer); }, phase_);"
WAIT_WAIT = "wait_at_least(arch_, cursor_of(peer), phase_, peer)"
REJOIN = "publish();\n    return wait_all();"

MUTANTS = (
    Mutant(
        "relaxed_publish",
        "wait_policy.h",
        STORE,
        "  arch.store_relaxed(cursor.value, value);\n",
        (Run("link", "race"), Run("board2", "race")),
    ),
    Mutant(
        "release_publish",
        "wait_policy.h",
        STORE,
        "  arch.store_release(cursor.value, value);\n",
        (Run("link", "deadlock"), Run("ring2", "deadlock"), Run("board2", "deadlock")),
    ),
    Mutant(
        "look_before_publish",
        "wait_policy.h",
        STORE + LOOK,
        "  const bool has_sleepers = arch.load_seq_cst(cursor.sleepers) != 0;\n"
        + STORE
        + "  if (has_sleepers) wake_sleepers(arch, cursor);\n",
        (Run("link", "deadlock"),),
    ),
    Mutant("sleep_unannounced", "wait_policy.h", ANNOUNCE, "", (Run("link", "deadlock"),)),
    # Harmless, and known to be: park() compares the word once more, after the announcement, in the
    # kernel. The sequence matters as soon as a machine's park() does not.
    Mutant(
        "announce_after_look",
        "wait_policy.h",
        ANNOUNCE + LOOK_AGAIN,
        LOOK_AGAIN + ANNOUNCE,
        (Run("link", "ok"), Run("ring2", "ok"), Run("board2", "ok")),
    ),
    Mutant(
        "no_abort_check",
        "wait_policy.h",
        GIVE_UP + SLEEP,
        SLEEP,
        (Run("link_death", "deadlock"), Run("board2_death", "deadlock")),
    ),
    Mutant(
        "stop_before_cursor",
        "wait_policy.h",
        LAST_WORD + GIVE_UP + SLEEP,
        GIVE_UP + SLEEP,
        (Run("link_death", "bad_stop"),),
    ),
    Mutant(
        "early_release",
        "link_protocol.h",
        RECEIVED + "  arch.copy(output, received, num_bytes);\n  from.release();\n",
        RECEIVED + "  from.release();\n  arch.copy(output, received, num_bytes);\n",
        (Run("link", "unowned"), Run("link", "race", (NO_OWNER,))),
    ),
    Mutant(
        "publish_before_fill",
        "link_protocol.h",
        "  arch.copy(slot, local, num_bytes);\n  to.publish();\n",
        "  to.publish();\n  arch.copy(slot, local, num_bytes);\n",
        (Run("link", "unowned"), Run("link", "race", (NO_OWNER,))),
    ),
    # The ring of two hides it from clocks and data: the message that would overwrite a slot comes
    # after one that the neighbour sent after it had read that slot. Only the ownership rule sees it
    # there.
    Mutant(
        "credit_too_many",
        "link_protocol.h",
        "wait_drained(geometry_.num_slots - 1)",
        "wait_drained(geometry_.num_slots)",
        (
            Run("ring2", "ok", (NO_OWNER,)),
            Run("ring2", "unowned"),
            Run("ring3", "wrong_data", (NO_OWNER,)),
            Run("ring4", "race", (NO_OWNER,)),
            Run("ring4_walks", "race", (NO_OWNER,)),
        ),
    ),
    Mutant(
        "try_credit_too_many",
        "link_protocol.h",
        ">= geometry_.num_slots) return false;",
        "> geometry_.num_slots) return false;",
        (Run("link_poll", "unowned"), Run("link_poll", "wrong_data", (NO_OWNER,))),
    ),
    Mutant(
        "read_before_published",
        "link_protocol.h",
        "wait_at_least(arch_, *geometry_.tail, head_ + 1, peer_)",
        "wait_at_least(arch_, *geometry_.tail, head_, peer_)",
        (Run("link", "race"),),
    ),
    Mutant(
        "tail_reset",
        "link_protocol.h",
        "advance(arch_, *geometry_.tail, ++tail_);",
        "advance(arch_, *geometry_.tail, ++tail_ % geometry_.num_slots);",
        (Run("link", "deadlock", (NO_OWNER,)), Run("ring2", "deadlock", (NO_OWNER,))),
    ),
    Mutant(
        "drained_too_early",
        "link_protocol.h",
        "tail_ - max_in_flight, peer_",
        "tail_ - max_in_flight - (max_in_flight == 0), peer_",
        (Run("link_recut", "wrong_data"),),
    ),
    Mutant(
        "board_open_unchecked",
        "board_protocol.h",
        OPEN_WAIT,
        OPEN_WAIT.replace("wait_all()", "WaitStatus::kNone"),
        (Run("board3_first", "unowned"), Run("board3_first", "wrong_data", (NO_OWNER,))),
    ),
    Mutant(
        "board_open_phase_early",
        "board_protocol.h",
        OPEN_ALL,
        OPEN_ALL.replace("phase_)", "phase_ - 2 * (phase_ > 1))"),  # a cursor counts in twos
        (Run("board3_first", "unowned"), Run("board3_first", "wrong_data", (NO_OWNER,))),
    ),
    # With two ranks there is only one to ask.
    Mutant(
        "board_one_reader_asked",
        "wait_policy.h",
        "arch.each(world_size - 1, [&]",
        "arch.each(1, [&]",
        (Run("board2", "ok"), Run("board3_first", "wrong_data", (NO_OWNER,))),
    ),
    Mutant(
        "board_wait_phase_early",
        "board_protocol.h",
        WAIT_WAIT,
        WAIT_WAIT.replace("phase_,", "phase_ - (phase_ > 0),"),
        (
            Run("board2", "unowned"),
            Run("board2", "race", (NO_OWNER,)),
            Run("lend2", "race"),
            Run("lend3", "race"),
        ),
    ),
    # Leaves before the peers have done with what was lent to them.
    Mutant(
        "rejoin_unwaited",
        "board_protocol.h",
        REJOIN,
        "publish();\n    return WaitStatus::kNone;",
        (Run("lend2", "race"), Run("lend3", "race")),
    ),
    # Waits, but does not say that it has done itself.
    Mutant(
        "rejoin_unpublished",
        "board_protocol.h",
        REJOIN,
        "return wait_all();",
        (Run("lend2", "race"), Run("lend3", "race")),
    ),
    # A reader that is not told waits for ever; one that is told too early reads what is not there.
    Mutant(
        "copies_one_missed",
        "wait_policy.h",
        "      num_readers, [&]",
        "      num_readers - 1, [&]",
        (Run("board2_copies", "deadlock"), Run("board3_copies", "deadlock")),
    ),
    Mutant(
        "copies_relaxed",
        "wait_policy.h",
        "arch.store_seq_cst_each(",
        "arch.store_relaxed_each(",
        (Run("board2_copies", "race"), Run("board3_copies", "race")),
    ),
    # Believes its own cursor, and so waits for nobody.
    Mutant(
        "copies_own_asked",
        "board_protocol.h",
        "Cursor& { return cursor_of(peer); }",
        "Cursor& { return cursor_of(rank_); }",
        (Run("board3_copies", "unowned"), Run("board3_copies", "wrong_data", (NO_OWNER,))),
    ),
    Mutant(
        "copies_sleepers_forgotten",
        "wait_policy.h",
        "wake_sleepers(arch, cursor_of(reader));",
        "(void)reader;",
        (Run("board2_copies", "deadlock"),),
    ),
    # Looks where the peer publishes the next phase.
    Mutant(
        "board_wrong_cursor",
        "board_protocol.h",
        "geometry_.cursor(rank_, peer, phase_ - 1)",
        "geometry_.cursor(rank_, peer, phase_)",
        (Run("board2", "deadlock"), Run("lend2", "deadlock")),
    ),
    Mutant(
        "board_wrong_region",
        "board_protocol.h",
        "geometry_.region(peer, phase_ - 1)",
        "geometry_.region(peer, phase_)",
        (Run("board2", "unowned"), Run("board2", "race", (NO_OWNER,))),
    ),
    # What is published beside a cursor in the next phase overwrites what a slow peer has not read.
    Mutant(
        "payload_one_cursor",
        "board_protocol.h",
        "geometry_.cursor(rank_, rank, rank == rank_ ? phase_ : phase_ - 1).payload",
        "geometry_.cursor(rank_, rank, 0).payload",
        (Run("board2_payload", "unowned"), Run("board2_payload", "race", (NO_OWNER,))),
    ),
    Mutant(
        "payload_read_of_next",
        "board_protocol.h",
        "rank == rank_ ? phase_ : phase_ - 1).payload",
        "phase_).payload",
        (Run("board2_payload", "unowned"), Run("board3_payload", "race", (NO_OWNER,))),
    ),
    Mutant(
        "shards_fewest_phases",
        "chunk_layout.h",
        "most = std::max(most, senders[from].num_pieces);",
        "most = from == 0 ? senders[0].num_pieces : std::min(most, senders[from].num_pieces);",
        (Run("shards2", "wrong_data"), Run("shards3", "wrong_data")),
    ),
    # All-to-all in place: a longer slice comes in than has gone out.
    Mutant(
        "shards_not_kept",
        "chunk_layout.h",
        "return senders[peer].num_pieces < senders[rank].num_pieces ||"
        " senders[peer].elems != given_elems;",
        "return false;",
        (
            Run("shards2", "ok"),
            Run("shards2_in_place", "wrong_data"),
            Run("shards3_in_place", "wrong_data"),
        ),
    ),
    # Ranks of a host wait for each other there, and for a rank of the other one in a circle.
    Mutant(
        "hosts_inside_last",
        "chunk_layout.h",
        "const bool is_inside_last = !is_inside_first;",
        "const bool is_inside_last = true || is_inside_first;",
        (
            Run("hosts_aab", "ok"),
            Run("hosts_aaab", "deadlock"),
            Run("hosts_aaba", "deadlock"),
            Run("hosts_aaab_short", "ok"),
        ),
    ),
    Mutant(
        "hosts_unfinished",
        "chunk_layout.h",
        "if (is_inside_last) inside();\n  finish();",
        "if (is_inside_last) inside();",
        (Run("hosts_aaab", "wrong_data"),),
    ),
    # One place for all calls: a packet is overwritten before it was read.
    Mutant(
        "packet_one_place",
        "packet_protocol.h",
        "number % 2",
        "number % 1",
        (Run("packet2", "deadlock"), Run("packet2_high", "deadlock")),
    ),
    # Believes a packet whose other half is still that of an earlier call.
    Mutant(
        "packet_half_flagged",
        "packet_protocol.h",
        "if (low >> 32 != flag || high >> 32 != flag) return false;",
        "if (low >> 32 != flag) return false;",
        (Run("packet2", "wrong_data"), Run("packet2_high", "ok")),
    ),
    Mutant(
        "packet_flag_of_turn",
        "packet_protocol.h",
        "number % 0xffffffffu",
        "number % 2",
        (Run("packet2", "wrong_data"),),
    ),
    Mutant(
        "verdict_not_first",
        "survivor_protocol.h",
        "arch_.set_first(words_.verdict(attempt), has_made ? kAllMade : kFailed);",
        "arch_.store_seq_cst(words_.verdict(attempt), has_made ? kAllMade : kFailed);",
        (Run("survivors2_impatient", "wrong_data"),),
    ),
    Mutant(
        "chosen_not_first",
        "survivor_protocol.h",
        "arch_.set_first(words_.chosen(attempt), static_cast<std::uint64_t>(rank_) + 1);",
        "arch_.store_seq_cst(words_.chosen(attempt), static_cast<std::uint64_t>(rank_) + 1);",
        (Run("survivors2_impatient", "wrong_data"),),
    ),
    Mutant(
        "verdict_without_wait",
        "survivor_protocol.h",
        "has_made = wait_for(attempt, kMade, peer) == WaitStatus::kNone;",
        "has_made = true;",
        (Run("survivors2_death", "wrong_data"),),
    ),
)
