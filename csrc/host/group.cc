#include "host/group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/annotations.h"
#include "core/errors.h"

namespace ringcomm::host {
namespace {

// The sum of N regions reads all at once. If they began at the same place of a page, equal elements
// would compete for one set of an L1 cache: 32 sources take 1.8 times as long.
constexpr std::size_t kNumShifts = 4096 / kLineBytes;

// From one board to the next, with room for the shift.
std::size_t board_stride_bytes(const SegmentConfig& config) {
  return whole_pages(whole_pages(config.board_region_bytes) + (kNumShifts - 1) * kLineBytes);
}

// The one with number `idx` of the links that begin at `begin`.
LinkGeometry link_at(std::byte* begin, int idx, std::uint32_t num_slots, std::size_t slot_bytes) {
  begin += static_cast<std::size_t>(idx) * link_bytes(num_slots, slot_bytes);
  auto* cursors = reinterpret_cast<LinkCursors*>(begin);
  return {.tail = &cursors->tail,
          .head = &cursors->head,
          .slots = begin + whole_pages(sizeof(LinkCursors)),
          .num_slots = num_slots,
          .slot_bytes = slot_bytes};
}

template <class Word>
Word load_acquire(const Word& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

void reserve_link(const LinkGeometry& link) {
  reserve_pages(reinterpret_cast<std::byte*>(link.tail),
                link_bytes(link.num_slots, link.slot_bytes));
}

// Of the ranks of one host.
double cores_of_each(const Rendezvous& rendezvous, const std::vector<int>& ranks) {
  std::vector<std::string> cores;
  for (const int rank : ranks) cores.push_back(rendezvous.record_of(rank).cores);
  const auto& limit = cgroup_limits().cpu_cores;
  return limit ? cores_per_rank(cores, limit->value) : cores_per_rank(cores);
}

}  // namespace

std::size_t link_bytes(std::uint32_t num_slots, std::size_t slot_bytes) {
  return whole_pages(sizeof(LinkCursors)) + whole_pages(num_slots * slot_bytes);
}

SegmentLayout::SegmentLayout(int world_size, const SegmentConfig& config)
    : world_size_(world_size), config_(config) {
  const auto world = static_cast<std::size_t>(world_size);
  control_offset_bytes_ =
      whole_pages(sizeof(AbortRecord) + sizeof(SurvivorChoices) + world * sizeof(std::uint32_t));
  boards_offset_bytes_ = control_offset_bytes_ + world * whole_pages(sizeof(RankControl));
  rings_offset_bytes_ = boards_offset_bytes_ + world * 2 * board_stride_bytes(config);
  send_recv_offset_bytes_ =
      rings_offset_bytes_ + world * link_bytes(config.ring_num_slots, config.ring_slot_bytes);
  num_bytes_ =
      send_recv_offset_bytes_ +
      world * (world - 1) * link_bytes(config.send_recv_num_slots, config.send_recv_slot_bytes);
}

std::uint32_t& SegmentLayout::has_joined(std::byte* base, int rank) const {
  base += sizeof(AbortRecord) + sizeof(SurvivorChoices);
  return reinterpret_cast<std::uint32_t*>(base)[rank];
}

RankControl& SegmentLayout::control(std::byte* base, int rank) const {
  base += control_offset_bytes_ + static_cast<std::size_t>(rank) * whole_pages(sizeof(RankControl));
  return *reinterpret_cast<RankControl*>(base);
}

BoardGeometry SegmentLayout::board(std::byte* base) const {
  const std::size_t stride_bytes = board_stride_bytes(config_);
  return {.world_size = world_size_,
          .cursors = base + boards_offset_bytes_,
          .cursor_stride_bytes = stride_bytes,
          .regions = base + boards_offset_bytes_ + sizeof(Cursor),
          .region_stride_bytes = stride_bytes,
          .region_bytes = whole_pages(config_.board_region_bytes) - sizeof(Cursor),
          .num_shifts = kNumShifts};
}

LinkGeometry SegmentLayout::ring_link(std::byte* base, int rank) const {
  return link_at(base + rings_offset_bytes_, rank, config_.ring_num_slots, config_.ring_slot_bytes);
}

LinkGeometry SegmentLayout::send_recv_link(std::byte* base, int from, int to) const {
  const int pair_idx = from * (world_size_ - 1) + (to < from ? to : to - 1);
  return link_at(base + send_recv_offset_bytes_, pair_idx, config_.send_recv_num_slots,
                 config_.send_recv_slot_bytes);
}

Group::Group(Rendezvous& rendezvous, const std::vector<int>& ranks, const SegmentConfig& config)
    : ranks_(ranks),
      rank_(static_cast<int>(std::find(ranks.begin(), ranks.end(), rendezvous.rank()) -
                             ranks.begin())),
      layout_(world_size(), config),
      core_share_(cores_of_each(rendezvous, ranks)),
      memory_(std::make_shared<SharedMemory>(rendezvous.share_memory(ranks, layout_.num_bytes()))) {
  for (const int rank : ranks) {
    processes_.push_back(rendezvous.processes()[static_cast<std::size_t>(rank)]);
    global_ranks_.push_back(rendezvous.global_rank_of(rank));
  }
  key_ = rendezvous.memory_key();
  try {
    // The pages that its peers poll come to this rank's NUMA node.
    __atomic_store_n(&control(rank_).has_left, 0U, __ATOMIC_RELAXED);
    for (const int parity : {0, 1})
      __atomic_store_n(&board().cursor(rank_, rank_, parity).value, 0U, __ATOMIC_RELAXED);
    reserve_own_memory();
    RINGCOMM_STEP("before a rank has joined");
    join();
    RINGCOMM_STEP("after a rank has joined");
    wait_until_joined(rendezvous);
  } catch (const std::exception& error) {  // also the store's
    // Of the others some wait in the memory, and some have yet to fetch it: those find the reason
    // in this rank's record.
    abort(rendezvous.report_failure(error));
    join();  // if it had no memory: its peers do not wait for it
    throw;
  }
}

// The pages that this rank writes, but for those of messages (reserve_send_recv()).
void Group::reserve_own_memory() {
  const BoardGeometry geometry = board();
  reserve_pages(memory_->data(), static_cast<std::size_t>(geometry.cursors - memory_->data()));
  auto* begin = reinterpret_cast<std::byte*>(&geometry.cursor(rank_, rank_, 0));
  const std::byte* end = geometry.region(rank_, 1) + geometry.region_bytes;
  reserve_pages(begin, static_cast<std::size_t>(end - begin));
  reserve_link(ring_link(rank_));
}

void Group::reserve_send_recv(int to) { reserve_link(send_recv_link(rank_, to)); }

void Group::join() {
  __atomic_store_n(&layout_.has_joined(memory_->data(), rank_), 1U, __ATOMIC_RELEASE);
}

// A rank that has not joined needs the others' records, processes and rank 0's offer. So no rank
// returns, and may end, before all have joined: one that ended before, joined or not, is missed.
void Group::wait_until_joined(Rendezvous& rendezvous) {
  const auto has_joined = [&](int peer) {
    const auto found = std::ranges::find(ranks_, peer);
    if (found == ranks_.end()) return true;  // on another host
    // Read before whether the peer has joined, and before the reason for which it may have left.
    int dead = -1;
    for (int rank = 0; rank < world_size(); ++rank)
      if (has_died(rank)) dead = group_rank(rank);
    const bool was_aborted = state_of(rank_) == WaitStatus::kAborted;
    const auto rank = static_cast<int>(found - ranks_.begin());
    if (load_acquire(layout_.has_joined(memory_->data(), rank)) != 0) return true;
    if (was_aborted) rendezvous.throw_reported(abort_reason());
    if (dead >= 0) rendezvous.throw_died(dead);
    return false;
  };
  rendezvous.wait_for_all(has_joined, {}, "did not map the shared-memory descriptor");
}

Group::~Group() {
  if (generation_ != process_generation()) return;  // inherited by fork(): the parent's
  RINGCOMM_STEP("before a rank has left");
  __atomic_store_n(&control(rank_).has_left, 1U, __ATOMIC_RELEASE);
  __atomic_fetch_add(&abort_record().num_left, 1U, __ATOMIC_RELEASE);
}

// Values read from the memory are checked, because a faulty peer may have written them.

int Group::writer_of(std::uint32_t abort_state) const {
  const std::uint32_t writer = abort_state - AbortRecord::kFirstWriter;
  const bool is_rank = abort_state >= AbortRecord::kFirstWriter && writer < ranks_.size();
  return is_rank ? static_cast<int>(writer) : -1;
}

WaitStatus Group::state_of(int peer) const {
  const std::uint32_t state = load_acquire(abort_record().state);
  if (state == AbortRecord::kWritten) return WaitStatus::kAborted;
  // Until the reason is written, it is not known that ranks which have left knew of it.
  if (const int writer = writer_of(state); writer >= 0)
    return has_died(writer) ? WaitStatus::kAborted : WaitStatus::kNone;
  if (peer == rank_) return WaitStatus::kNone;
  if (has_left(peer)) return WaitStatus::kPeerLeft;
  return has_died(peer) ? WaitStatus::kPeerDied : WaitStatus::kNone;
}

std::int64_t Group::num_calls_of(int rank) const {
  return static_cast<std::int64_t>(load_acquire(control(rank).num_calls));
}

bool Group::has_left(int rank) const { return load_acquire(control(rank).has_left) != 0; }

std::function<bool()> Group::left_by_all() const {
  return [memory = memory_, layout = layout_, processes = processes_] {
    for (int rank = 0; rank < static_cast<int>(processes.size()); ++rank)
      if (!processes[static_cast<std::size_t>(rank)]->is_dead &&
          load_acquire(layout.control(memory->data(), rank).has_left) == 0)
        return false;
    return true;
  };
}

int Group::gone_before(std::uint64_t seq) {
  const std::uint64_t num_gone = PeerProcess::num_ended.load(std::memory_order_acquire) +
                                 load_acquire(abort_record().num_left);
  if (num_gone == num_gone_seen_) return -1;
  bool is_whole = true;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (rank == rank_ || (!has_died(rank) && !has_left(rank))) continue;
    is_whole = false;
    if (num_calls_of(rank) <= static_cast<std::int64_t>(seq)) return rank;
  }
  if (is_whole) num_gone_seen_ = num_gone;
  return -1;
}

bool Group::record_call(std::uint64_t seq) {
  ++num_begun_;
  std::uint64_t& num_calls = control(rank_).num_calls;
  const bool is_first = num_calls != seq + 1;
  __atomic_store_n(&num_calls, seq + 1, __ATOMIC_RELAXED);
  return is_first;
}

void Group::record_end() {
  __atomic_store_n(&control(rank_).num_ended, ++num_ended_, __ATOMIC_RELEASE);
}

void Group::return_idle_pages() {
  if (std::exchange(num_ended_seen_, num_ended_) != num_ended_ || num_begun_ != num_ended_ ||
      num_returned_ == num_ended_ || may_refuse_pages())
    return;
  // In a later call peers read this rank's region only after it has published.
  for (int peer = 0; peer < world_size(); ++peer)
    if (load_acquire(control(peer).num_ended) < num_ended_ && !has_died(peer) && !has_left(peer))
      return;
  num_returned_ = num_ended_;
  for (const int parity : {0, 1}) return_pages(board().region(rank_, parity), board().region_bytes);
  const LinkGeometry ring = ring_link(rank_);  // drained, as all have ended
  return_pages(ring.slots, ring.num_slots * ring.slot_bytes);
}

std::uint64_t Group::num_published(int rank) const {
  const BoardGeometry geometry = board();
  return std::max(load_acquire(geometry.cursor(rank_, rank, 0).value),
                  load_acquire(geometry.cursor(rank_, rank, 1).value));
}

int Group::missing_rank() const {
  const std::uint64_t own = num_published(rank_);
  for (int rank = 0; rank < world_size(); ++rank) {
    // The state first: it was there before the end what the rank published.
    if (rank != rank_ && state_of(rank) != WaitStatus::kNone && num_published(rank) < own)
      return rank;
  }
  return -1;
}

int Group::late_rank(int peer) const {
  int late = peer;
  for (int rank = 0; rank < world_size(); ++rank)
    if (num_published(rank) < std::min(num_published(rank_), num_published(late))) late = rank;
  return late;
}

bool Group::is_aborted(bool) noexcept {
  return load_acquire(abort_record().state) != AbortRecord::kNone;
}

void Group::abort(const AbortReason& reason) {
  AbortRecord& record = abort_record();
  std::uint32_t expected = AbortRecord::kNone;
  const std::uint32_t writer = AbortRecord::kFirstWriter + static_cast<std::uint32_t>(rank_);
  if (!__atomic_compare_exchange_n(&record.state, &expected, writer, false, __ATOMIC_ACQ_REL,
                                   __ATOMIC_ACQUIRE))
    return;
  RINGCOMM_STEP("while the reason of an abort is written");
  record.kind = static_cast<std::uint32_t>(reason.kind);
  record.origin = reason.origin;
  record.culprit = reason.culprit;
  const std::size_t num_chars = std::min(reason.text.size(), sizeof(record.text) - 1);
  std::memcpy(record.text, reason.text.data(), num_chars);
  record.text[num_chars] = '\0';
  __atomic_store_n(&record.state, AbortRecord::kWritten, __ATOMIC_RELEASE);
}

AbortReason Group::abort_reason() const {
  const AbortRecord& record = abort_record();
  // A rank that lives writes it in a moment.
  int writer = -1;
  const auto is_writing = [&] {
    writer = writer_of(load_acquire(record.state));
    return writer >= 0 && !has_died(writer);
  };
  const auto deadline = deadline_after(std::chrono::seconds(1));
  for (Backoff backoff; is_writing() && RunningClock::now() < deadline;) backoff.sleep();
  if (writer >= 0)
    return {.kind = ErrorKind::kPeerDied,
            .origin = group_rank(writer),
            .culprit = group_rank(writer),
            .text = "it died before it could report why"};
  return {.kind = static_cast<ErrorKind>(record.kind),
          .origin = record.origin,
          .culprit = record.culprit,
          .text = {record.text, ::strnlen(record.text, sizeof(record.text))}};
}

}  // namespace ringcomm::host
