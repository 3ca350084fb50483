#pragma once

#include <cstddef>
#include <cstdint>

#include "core/arch.h"
#include "core/wait_policy.h"
#include "machine.h"

namespace ringcomm {
struct Packet;
}  // namespace ringcomm

namespace ringcomm::checker {

/// The machine on which the protocols of core are explored. Every operation, and every block of
/// payload, is a scheduling point at which any other rank may go first.
class CheckerArch {
 public:
  CheckerArch(Machine& machine, int rank) : machine_(machine), rank_(rank) {}

  std::uint64_t load_acquire(const std::uint64_t& word) { return load(Op::kLoadAcquire, word); }
  std::uint64_t load_seq_cst(const std::uint64_t& word) { return load(Op::kLoadSeqCst, word); }
  std::uint32_t load_seq_cst(const std::uint32_t& count) {
    return static_cast<std::uint32_t>(load(Op::kLoadSeqCst, count));
  }
  /// For SurvivorProtocol, as is read_once(): what is read decides the rest of the program.
  void set_first(std::uint64_t& word, std::uint64_t value) {
    machine_.point(rank_);
    const int idx = machine_.memory.word_idx(&word);
    machine_.memory.flush_all(rank_);
    if (machine_.memory.peek(idx) == 0) machine_.memory.store(rank_, idx, value, Order::kSeqCst);
    machine_.observe(Op::kStoreSeqCst, rank_, idx, value);
  }
  std::uint64_t read_once(const std::uint64_t& word) { return load(Op::kReadOnce, word); }
  /// Not part of the concept; for mutants.
  void store_relaxed(std::uint64_t& word, std::uint64_t value) {
    store(Op::kStoreRelaxed, Order::kRelaxed, word, value);
  }
  void store_release(std::uint64_t& word, std::uint64_t value) {
    store(Op::kStoreRelease, Order::kRelease, word, value);
  }
  void store_seq_cst(std::uint64_t& word, std::uint64_t value) {
    store(Op::kStoreSeqCst, Order::kSeqCst, word, value);
  }
  /// Stores to the readers one after the other; other ranks may run between any two stores.
  template <class WordOf>
  void store_seq_cst_each(int num, const WordOf& word_of, std::uint64_t value) {
    for (int i = 0; i < num; ++i) store_seq_cst(word_of(i), value);
  }
  /// For mutants.
  template <class WordOf>
  void store_relaxed_each(int num, const WordOf& word_of, std::uint64_t value) {
    for (int i = 0; i < num; ++i) store_relaxed(word_of(i), value);
  }
  void add_seq_cst(std::uint32_t& count, std::int32_t delta) {
    machine_.point(rank_);
    const int idx = machine_.memory.word_idx(&count);
    machine_.memory.add(rank_, idx, delta);
    machine_.observe(Op::kAdd, rank_, idx, static_cast<std::uint64_t>(std::int64_t{delta}));
  }

  void copy(void* to, const void* from, std::size_t num_bytes) {
    for (std::size_t at = 0; at < num_bytes; at += kBlockBytes) {
      write(static_cast<std::byte*>(to) + at, read(static_cast<const std::byte*>(from) + at));
    }
  }
  /// The sum of 64-bit integers, as link_protocol.h calls its Combine.
  void combine(std::byte* to, std::byte* also_to, const std::byte* received, const std::byte* local,
               std::size_t num_bytes) {
    for (std::size_t at = 0; at < num_bytes; at += kBlockBytes) {
      const std::uint64_t sum = read(received + at) + read(local + at);
      write(to + at, sum);
      if (also_to != nullptr) write(also_to + at, sum);
    }
  }

  /// A packet's words are the values of two consecutive cursors. Each becomes visible
  /// independently; the scenario chooses the order, and waiting for one is parking on it.
  void store_packet(Packet& packet, std::uint64_t low, std::uint64_t high) {
    store_half(packet, stores_high_first, stores_high_first ? high : low);
    store_half(packet, !stores_high_first, stores_high_first ? low : high);
  }
  void load_packet(const Packet& packet, std::uint64_t& low, std::uint64_t& high) {
    low = load_acquire(half_of(packet, false).value);
    high = load_acquire(half_of(packet, true).value);
  }
  static const Cursor& half_of(const Packet& packet, bool is_high) {
    return reinterpret_cast<const Cursor*>(&packet)[is_high ? 1 : 0];
  }
  bool stores_high_first = false;
  /// Its waits end at once, as if their time were up.
  bool waits_for_nobody = false;

  /// Does not spin: every interleaving is explored without.
  SpinBudget budget() { return SpinBudget::none(); }
  template <class F>
  WaitStatus once(const F& function) {
    return function();
  }
  template <class F>
  WaitStatus each(int num, const F& function) {
    WaitStatus stop = WaitStatus::kNone;
    for (int i = 0; i < num && stop == WaitStatus::kNone; ++i) stop = function(i);
    return stop;
  }

  void pause() { machine_.point(rank_); }
  Yielded yield() {
    machine_.point(rank_);
    return Yielded::kShort;
  }
  void park(const std::uint64_t& word, std::uint64_t expected) {
    machine_.point(rank_);
    machine_.park(rank_, machine_.memory.word_idx(&word), expected);
  }
  void wake(const std::uint64_t& word) {
    machine_.point(rank_);
    machine_.wake(rank_, machine_.memory.word_idx(&word));
  }
  void record_core(std::uint32_t&) {}
  void leave_core(const std::uint32_t&) {}
  WaitStatus stopped(int peer) {
    // Without a victim the answer never changes, so no interleaving point is needed.
    if (machine_.has_victim()) machine_.point(rank_);
    const WaitStatus stop = machine_.stopped(rank_, peer);
    return stop == WaitStatus::kNone && waits_for_nobody ? WaitStatus::kTimeout : stop;
  }

  /// Declares that this rank's program now depends on `step` and the checked memory only, so that
  /// states reached through different waits are merged. True between two primitives: their cursors
  /// count steps, and the buffers are checked memory.
  void checkpoint(std::uint64_t step) { machine_.checkpoint(rank_, step); }
  /// Demands something of the program that no access shows.
  void require(bool condition, ViolationKind kind, const char* what) {
    if (!condition) machine_.report(kind, rank_, what);
  }
  /// What a block holds that this rank has just read.
  std::uint64_t value_of(const std::byte* block) const { return machine_.memory.peek(block); }
  std::uint64_t peek(const std::uint64_t& word) const {
    return machine_.memory.peek(machine_.memory.word_idx(&word));
  }

 private:
  void store_half(Packet& packet, bool is_high, std::uint64_t value) {
    Cursor& cursor = reinterpret_cast<Cursor*>(&packet)[is_high ? 1 : 0];
    store_seq_cst(cursor.value, value);
    wake(cursor.value);
  }
  std::uint64_t load(Op op, const auto& word) {
    machine_.point(rank_);
    const int idx = machine_.memory.word_idx(&word);
    // `sleepers` orders no payload: see Memory.
    const std::uint64_t value = machine_.memory.load(rank_, idx, idx % 2 == 0);
    machine_.observe(op, rank_, idx, value);
    return value;
  }
  void store(Op op, Order order, const std::uint64_t& word, std::uint64_t value) {
    machine_.point(rank_);
    const int idx = machine_.memory.word_idx(&word);
    machine_.memory.store(rank_, idx, value, order);
    machine_.observe(op, rank_, idx, value);
  }
  std::uint64_t read(const std::byte* block) {
    const int idx = machine_.memory.cell_idx(block);
    if (machine_.steps_on_payload() && !machine_.memory.is_private(idx)) machine_.point(rank_);
    const std::uint64_t value = machine_.memory.read(rank_, idx);
    machine_.observe(Op::kRead, rank_, idx, value);
    return value;
  }
  void write(std::byte* block, std::uint64_t value) {
    const int idx = machine_.memory.cell_idx(block);
    if (machine_.steps_on_payload() && !machine_.memory.is_private(idx)) machine_.point(rank_);
    machine_.memory.write(rank_, idx, value);
    machine_.observe(Op::kWrite, rank_, idx, value);
  }

  Machine& machine_;
  int rank_;
};

static_assert(Arch<CheckerArch>);

}  // namespace ringcomm::checker
