"""What run_mutants.py breaks in csrc/core, and as what the checker must see it."""

import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class Mutant:
    """Of the protocols: a replacement in a header of csrc/core, and runs of the checker.

    A run is a scenario, the expected kind of violation ("ok" if there is none), and options.
    --no-owner looks at happens-before, data and progress only, not at whose turn a slot is.
    """

    header: str
    name: str
    old: str
    new: str
    runs: str


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

board_protocol = functools.partial(Mutant, "board_protocol.h")
chunk_layout = functools.partial(Mutant, "chunk_layout.h")
link_protocol = functools.partial(Mutant, "link_protocol.h")
packet_protocol = functools.partial(Mutant, "packet_protocol.h")
survivor_protocol = functools.partial(Mutant, "survivor_protocol.h")
wait_policy = functools.partial(Mutant, "wait_policy.h")

MUTANTS = (
    wait_policy(
        "relaxed_publish",
        STORE,
        "  arch.store_relaxed(cursor.value, value);\n",
        "link race, board2 race",
    ),
    wait_policy(
        "release_publish",
        STORE,
        "  arch.store_release(cursor.value, value);\n",
        "link deadlock, ring2 deadlock, board2 deadlock",
    ),
    wait_policy(
        "look_before_publish",
        STORE + LOOK,
        "  const bool has_sleepers = arch.load_seq_cst(cursor.sleepers) != 0;\n"
        + STORE
        + "  if (has_sleepers) wake_sleepers(arch, cursor);\n",
        "link deadlock",
    ),
    wait_policy("sleep_unannounced", ANNOUNCE, "", "link deadlock"),
    # Harmless, and known to be: park() compares the word once more, after the announcement, in the
    # kernel. The sequence matters as soon as a machine's park() does not.
    wait_policy(
        "announce_after_look",
        ANNOUNCE + LOOK_AGAIN,
        LOOK_AGAIN + ANNOUNCE,
        "link ok, ring2 ok, board2 ok",
    ),
    wait_policy(
        "no_abort_check",
        GIVE_UP + SLEEP,
        SLEEP,
        "link_death deadlock, board2_death deadlock",
    ),
    wait_policy(
        "stop_before_cursor",
        LAST_WORD + GIVE_UP + SLEEP,
        GIVE_UP + SLEEP,
        "link_death bad_stop",
    ),
    link_protocol(
        "early_release",
        RECEIVED + "  arch.copy(output, received, num_bytes);\n  from.release();\n",
        RECEIVED + "  from.release();\n  arch.copy(output, received, num_bytes);\n",
        "link unowned, link race --no-owner",
    ),
    link_protocol(
        "publish_before_fill",
        "  arch.copy(slot, local, num_bytes);\n  to.publish();\n",
        "  to.publish();\n  arch.copy(slot, local, num_bytes);\n",
        "link unowned, link race --no-owner",
    ),
    # The ring of two hides it from clocks and data: the message that would overwrite a slot comes
    # after one that the neighbour sent after it had read that slot. Only the ownership rule sees it
    # there.
    link_protocol(
        "credit_too_many",
        "wait_drained(geometry_.num_slots - 1)",
        "wait_drained(geometry_.num_slots)",
        "ring2 ok --no-owner, ring2 unowned, ring3 wrong_data --no-owner,"
        " ring4 race --no-owner, ring4_walks race --no-owner",
    ),
    link_protocol(
        "try_credit_too_many",
        ">= geometry_.num_slots) return false;",
        "> geometry_.num_slots) return false;",
        "link_poll unowned, link_poll wrong_data --no-owner",
    ),
    link_protocol(
        "read_before_published",
        "wait_at_least(arch_, *geometry_.tail, head_ + 1, peer_)",
        "wait_at_least(arch_, *geometry_.tail, head_, peer_)",
        "link race",
    ),
    link_protocol(
        "tail_reset",
        "advance(arch_, *geometry_.tail, ++tail_);",
        "advance(arch_, *geometry_.tail, ++tail_ % geometry_.num_slots);",
        "link deadlock --no-owner, ring2 deadlock --no-owner",
    ),
    link_protocol(
        "drained_too_early",
        "tail_ - max_in_flight, peer_",
        "tail_ - max_in_flight - (max_in_flight == 0), peer_",
        "link_recut wrong_data",
    ),
    board_protocol(
        "board_open_unchecked",
        OPEN_WAIT,
        OPEN_WAIT.replace("wait_all()", "WaitStatus::kNone"),
        "board3_first unowned, board3_first wrong_data --no-owner",
    ),
    board_protocol(
        "board_open_phase_early",
        OPEN_ALL,
        OPEN_ALL.replace("phase_)", "phase_ - 2 * (phase_ > 1))"),  # a cursor counts in twos
        "board3_first unowned, board3_first wrong_data --no-owner",
    ),
    # With two ranks there is only one to ask.
    wait_policy(
        "board_one_reader_asked",
        "arch.each(world_size - 1, [&]",
        "arch.each(1, [&]",
        "board2 ok, board3_first wrong_data --no-owner",
    ),
    board_protocol(
        "board_wait_phase_early",
        WAIT_WAIT,
        WAIT_WAIT.replace("phase_,", "phase_ - (phase_ > 0),"),
        "board2 unowned, board2 race --no-owner, lend2 race, lend3 race",
    ),
    # Leaves before the peers have done with what was lent to them.
    board_protocol(
        "rejoin_unwaited",
        REJOIN,
        "publish();\n    return WaitStatus::kNone;",
        "lend2 race, lend3 race",
    ),
    # Waits, but does not say that it has done itself.
    board_protocol(
        "rejoin_unpublished",
        REJOIN,
        "return wait_all();",
        "lend2 race, lend3 race",
    ),
    # A reader that is not told waits for ever; one that is told too early reads what is not there.
    wait_policy(
        "copies_one_missed",
        "      num_readers, [&]",
        "      num_readers - 1, [&]",
        "board2_copies deadlock, board3_copies deadlock",
    ),
    wait_policy(
        "copies_relaxed",
        "arch.store_seq_cst_each(",
        "arch.store_relaxed_each(",
        "board2_copies race, board3_copies race",
    ),
    # Believes its own cursor, and so waits for nobody.
    board_protocol(
        "copies_own_asked",
        "Cursor& { return cursor_of(peer); }",
        "Cursor& { return cursor_of(rank_); }",
        "board3_copies unowned, board3_copies wrong_data --no-owner",
    ),
    wait_policy(
        "copies_sleepers_forgotten",
        "wake_sleepers(arch, cursor_of(reader));",
        "(void)reader;",
        "board2_copies deadlock",
    ),
    # Looks where the peer publishes the next phase.
    board_protocol(
        "board_wrong_cursor",
        "geometry_.cursor(rank_, peer, phase_ - 1)",
        "geometry_.cursor(rank_, peer, phase_)",
        "board2 deadlock, lend2 deadlock",
    ),
    board_protocol(
        "board_wrong_region",
        "geometry_.region(peer, phase_ - 1)",
        "geometry_.region(peer, phase_)",
        "board2 unowned, board2 race --no-owner",
    ),
    # What is published beside a cursor in the next phase overwrites what a slow peer has not read.
    board_protocol(
        "payload_one_cursor",
        "geometry_.cursor(rank_, rank, rank == rank_ ? phase_ : phase_ - 1).payload",
        "geometry_.cursor(rank_, rank, 0).payload",
        "board2_payload unowned, board2_payload race --no-owner",
    ),
    board_protocol(
        "payload_read_of_next",
        "rank == rank_ ? phase_ : phase_ - 1).payload",
        "phase_).payload",
        "board2_payload unowned, board3_payload race --no-owner",
    ),
    chunk_layout(
        "shards_fewest_phases",
        "most = std::max(most, senders[from].num_pieces);",
        "most = from == 0 ? senders[0].num_pieces : std::min(most, senders[from].num_pieces);",
        "shards2 wrong_data, shards3 wrong_data",
    ),
    # All-to-all in place: a longer slice comes in than has gone out.
    chunk_layout(
        "shards_not_kept",
        "return senders[peer].num_pieces < senders[rank].num_pieces ||"
        " senders[peer].elems != given_elems;",
        "return false;",
        "shards2 ok, shards2_in_place wrong_data, shards3_in_place wrong_data",
    ),
    # Ranks of a host wait for each other there, and for a rank of the other one in a circle.
    chunk_layout(
        "hosts_inside_last",
        "const bool is_inside_last = !is_inside_first;",
        "const bool is_inside_last = true || is_inside_first;",
        "hosts_aab ok, hosts_aaab deadlock, hosts_aaba deadlock, hosts_aaab_short ok",
    ),
    chunk_layout(
        "hosts_unfinished",
        "if (is_inside_last) inside();\n  finish();",
        "if (is_inside_last) inside();",
        "hosts_aaab wrong_data",
    ),
    # One place for all calls: a packet is overwritten before it was read.
    packet_protocol(
        "packet_one_place",
        "number % 2",
        "number % 1",
        "packet2 deadlock, packet2_high deadlock",
    ),
    # Believes a packet whose other half is still that of an earlier call.
    packet_protocol(
        "packet_half_flagged",
        "if (low >> 32 != flag || high >> 32 != flag) return false;",
        "if (low >> 32 != flag) return false;",
        "packet2 wrong_data, packet2_high ok",
    ),
    packet_protocol(
        "packet_flag_of_turn",
        "number % 0xffffffffu",
        "number % 2",
        "packet2 wrong_data",
    ),
    survivor_protocol(
        "verdict_not_first",
        "arch_.set_first(words_.verdict(attempt), has_made ? kAllMade : kFailed);",
        "arch_.store_seq_cst(words_.verdict(attempt), has_made ? kAllMade : kFailed);",
        "survivors2_impatient wrong_data",
    ),
    survivor_protocol(
        "chosen_not_first",
        "arch_.set_first(words_.chosen(attempt), static_cast<std::uint64_t>(rank_) + 1);",
        "arch_.store_seq_cst(words_.chosen(attempt), static_cast<std::uint64_t>(rank_) + 1);",
        "survivors2_impatient wrong_data",
    ),
    survivor_protocol(
        "verdict_without_wait",
        "has_made = wait_for(attempt, kMade, peer) == WaitStatus::kNone;",
        "has_made = true;",
        "survivors2_death wrong_data",
    ),
)
