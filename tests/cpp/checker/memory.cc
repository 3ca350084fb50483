#include "memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace ringcomm::checker {
namespace {

constexpr std::uint64_t kPoison = 0xdeadbeefdeadbeefull;  // in cells never written

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "checker: %s\n", what);
  std::abort();
}

void join(Clock& clock, const Clock& other) {
  for (int i = 0; i < kMaxRanks; ++i) clock[i] = std::max(clock[i], other[i]);
}

}  // namespace

const char* name_of(ViolationKind kind) {
  switch (kind) {
    case ViolationKind::kRace:
      return "race";
    case ViolationKind::kUnowned:
      return "unowned";
    case ViolationKind::kDeadlock:
      return "deadlock";
    case ViolationKind::kWrongData:
      return "wrong_data";
    case ViolationKind::kBadStop:
      return "bad_stop";
  }
  return "?";
}

void Memory::clear(int num_ranks) {
  num_ranks_ = num_ranks;
  num_words_ = num_cells_ = num_payloads_ = 0;
  owners_.clear();
  violation.reset();
  state = MemoryState{};
  for (int rank = 0; rank < num_ranks; ++rank) state.clocks[rank][rank] = 1;
}

Cursor* Memory::add_cursors(int num_cursors, std::vector<std::string> names) {
  if (num_words_ + 2 * num_cursors > kMaxWords) die("too many words: raise kMaxWords");
  Cursor* first = &cursors_[num_words_ / 2];
  for (int i = 0; i < num_cursors; ++i) {
    word_names_[num_words_++] = names[i];
    word_names_[num_words_++] = names[i] + ".sleepers";
  }
  return first;
}

std::byte* Memory::add_cells(int num_blocks, const std::string& name, int private_rank) {
  if (num_cells_ + num_blocks > kMaxCells) die("too many payload blocks: raise kMaxCells");
  std::byte* first = &payload_[num_cells_ * kBlockBytes];
  for (int i = 0; i < num_blocks; ++i) {
    CellInfo& info = cell_infos_[num_cells_];
    info = CellInfo{};
    info.name = name + "[" + std::to_string(i) + "]";
    info.private_rank = private_rank;
    state.cells[num_cells_++].value = kPoison;
  }
  return first;
}

std::byte* Memory::add_private(int rank, int num_blocks, const std::string& name) {
  return add_cells(num_blocks, name, rank);
}

std::byte* Memory::add_shared(int num_blocks, const std::string& name) {
  return add_cells(num_blocks, name, -1);
}

void Memory::add_payload(Cursor* first, int num_cursors, const std::string& name) {
  payload_begin_ = first;
  num_payloads_ = num_cursors;
  payload_cell_idx_ = num_cells_;
  add_cells(num_cursors, name, -1);
}

void Memory::own_as_link(std::byte* slots, int num_slots, int slot_blocks, const Cursor& tail,
                         const Cursor& head, int sender, int receiver) {
  for (int i = 0; i < num_slots * slot_blocks; ++i) {
    CellInfo& info = cell_infos_[cell_idx(slots) + i];
    info.owner_idx = static_cast<int>(owners_.size());
    info.slot_idx = i / slot_blocks;
  }
  owners_.push_back({true, sender, receiver, word_idx(&tail.value), word_idx(&head.value),
                     static_cast<std::uint64_t>(num_slots)});
}

void Memory::own_as_board(std::byte* regions, int region_blocks, const Cursor* published,
                          int writer, bool has_copies) {
  for (int i = 0; i < 2 * region_blocks; ++i) {
    CellInfo& info = cell_infos_[cell_idx(regions) + i];
    info.owner_idx = static_cast<int>(owners_.size());
    info.slot_idx = i / region_blocks;
  }
  owners_.push_back({false, writer, -1, word_idx(&published->value), -1, 2, has_copies});
}

int Memory::word_idx(const void* word) const {
  const auto offset =
      static_cast<const std::byte*>(word) - reinterpret_cast<const std::byte*>(&cursors_);
  const int idx = static_cast<int>(offset / static_cast<std::ptrdiff_t>(kLineBytes));
  if (offset < 0 || offset % static_cast<std::ptrdiff_t>(kLineBytes) != 0 || idx >= num_words_) {
    die("an Arch operation on something that is no cursor");
  }
  return idx;
}

int Memory::cell_idx(const void* block) const {
  for (int i = 0; i < num_payloads_; ++i)
    if (block == payload_begin_[i].payload) return payload_cell_idx_ + i;
  const auto offset = static_cast<const std::byte*>(block) - payload_.data();
  if (offset < 0 || offset >= num_cells_ * static_cast<std::ptrdiff_t>(kBlockBytes) ||
      offset % 8 != 0) {
    die("a payload access outside the checker's memory");
  }
  return static_cast<int>(offset / 8);
}

std::uint64_t Memory::seen_by(int rank, int word_idx) const {
  const auto& buffer = state.buffers[rank];
  for (std::uint64_t i = buffer.num_stores; i > 0; --i) {
    const auto& store = buffer.stores[i - 1];
    if (store.word_idx == static_cast<std::uint64_t>(word_idx)) return store.value;
  }
  return state.words[word_idx].value;
}

std::uint64_t Memory::load(int rank, int word_idx, bool acquires) {
  if (acquires) join(state.clocks[rank], state.words[word_idx].clock);
  return seen_by(rank, word_idx);
}

void Memory::store(int rank, int word_idx, std::uint64_t value, Order order) {
  Clock carried{};
  if (order != Order::kRelaxed) {
    carried = state.clocks[rank];
    ++state.clocks[rank][rank];  // later writes are not part of this publication
  }
  auto& buffer = state.buffers[rank];
  // A real buffer is finite too; this depth only has to exceed what the protocols delay at once.
  if (buffer.num_stores == kMaxDelayedStores) flush_one(rank);
  buffer.stores[buffer.num_stores++] = {static_cast<std::uint64_t>(word_idx), value, carried};
  if (order == Order::kSeqCst) flush_all(rank);
}

void Memory::add(int rank, int word_idx, std::int32_t delta) {
  flush_all(rank);
  auto& value = state.words[word_idx].value;
  value = static_cast<std::uint32_t>(value + static_cast<std::uint64_t>(std::int64_t{delta}));
}

void Memory::flush_one(int rank) {
  auto& buffer = state.buffers[rank];
  const auto oldest = buffer.stores[0];
  state.words[oldest.word_idx] = {oldest.value, oldest.clock};
  std::move(buffer.stores.begin() + 1, buffer.stores.end(), buffer.stores.begin());
  buffer.stores.back() = {};
  --buffer.num_stores;
}

void Memory::flush_all(int rank) {
  while (has_delayed(rank)) flush_one(rank);
}

std::uint64_t Memory::read(int rank, int cell_idx) {
  auto& cell = state.cells[cell_idx];
  if (is_private(cell_idx)) return cell.value;
  check_owner(rank, cell_idx, "reads");
  const Clock& clock = state.clocks[rank];
  if (!may_touch(cell_infos_[cell_idx], rank))
    report(ViolationKind::kUnowned, rank, cell_idx, "reads from outside");
  if (cell.write_epoch == 0) {
    report(ViolationKind::kRace, rank, cell_idx, "reads a block never written");
  } else if (cell.write_epoch > clock[cell.writer]) {
    report(ViolationKind::kRace, rank, cell_idx,
           "reads what rank " + std::to_string(cell.writer) + " wrote, unordered");
  }
  cell.read_epochs[rank] = clock[rank];
  return cell.value;
}

void Memory::write(int rank, int cell_idx, std::uint64_t value) {
  auto& cell = state.cells[cell_idx];
  cell.value = value;
  if (is_private(cell_idx)) return;
  check_owner(rank, cell_idx, "writes");
  const Clock& clock = state.clocks[rank];
  if (!may_touch(cell_infos_[cell_idx], rank))
    report(ViolationKind::kUnowned, rank, cell_idx, "writes from outside");
  if (cell.write_epoch > clock[cell.writer]) {
    report(ViolationKind::kRace, rank, cell_idx,
           "overwrites what rank " + std::to_string(cell.writer) + " wrote, unordered");
  }
  for (int reader = 0; reader < num_ranks_; ++reader) {
    if (cell.read_epochs[reader] <= clock[reader]) continue;
    report(ViolationKind::kRace, rank, cell_idx,
           "overwrites what rank " + std::to_string(reader) + " read, unordered");
  }
  cell.read_epochs = {};
  cell.writer = static_cast<std::uint32_t>(rank);
  cell.write_epoch = clock[rank];
}

bool Memory::may_touch(const CellInfo& info, int rank) const {
  if (info.owner_idx < 0 || !owners_[info.owner_idx].is_link) return true;
  return rank == owners_[info.owner_idx].writer || rank == owners_[info.owner_idx].reader;
}

void Memory::check_owner(int rank, int cell_idx, const char* verb) {
  const CellInfo& info = cell_infos_[cell_idx];
  if (!checks_owner || info.owner_idx < 0) return;
  const Owner& owner = owners_[info.owner_idx];
  const auto slot_idx = static_cast<std::uint64_t>(info.slot_idx);
  // The one that fills may also read; the others only read.
  const bool is_allowed =
      owner.is_link ? owns_link(owner, rank, slot_idx) : owns_region(owner, rank, slot_idx);
  const bool is_reader_writing = rank != owner.writer && verb[0] == 'w';
  if (!is_allowed || is_reader_writing) {
    report(ViolationKind::kUnowned, rank, cell_idx, std::string(verb) + " outside its turn");
  }
}

bool Memory::owns_link(const Owner& owner, int rank, std::uint64_t slot_idx) const {
  const std::uint64_t tail = seen_by(rank, owner.tail_word_idx);
  const std::uint64_t head = seen_by(rank, owner.head_word_idx);
  if (rank == owner.writer)
    return slot_idx == tail % owner.num_slots && tail - head < owner.num_slots;
  return rank == owner.reader && slot_idx == head % owner.num_slots && head < tail;
}

bool Memory::owns_region(const Owner& owner, int rank, std::uint64_t parity) const {
  // With copies, the reader's own cursors in rank order; else two of each rank. A cursor is two
  // words.
  const auto word_of = [&](int of, int idx) {
    const int cursor_idx = owner.has_copies ? num_ranks_ * rank + of : 2 * of + idx;
    return owner.tail_word_idx + 2 * cursor_idx;
  };
  const std::uint64_t mine =
      std::max(seen_by(rank, word_of(rank, 0)), seen_by(rank, word_of(rank, 1)));
  const auto has_published = [&](int peer) {
    return std::max(peek(word_of(peer, 0)), peek(word_of(peer, 1))) >= mine;
  };
  if (rank != owner.writer)  // in phase mine - 1, reading
    return mine > 0 && (mine - 1) % 2 == parity && has_published(owner.writer);
  if (mine % 2 != parity) return false;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer != rank && !has_published(peer)) return false;
  }
  return true;
}

void Memory::report(ViolationKind kind, int rank, int cell_idx, const std::string& what) {
  if (violation) return;
  violation = {kind, "rank " + std::to_string(rank) + " " + what + ": " + cell_name(cell_idx)};
}

}  // namespace ringcomm::checker
