#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "core/arch.h"

namespace ringcomm::checker {

/// The errors of a protocol. run_mutants.py uses these names and expects one per mutant.
enum class ViolationKind {
  kRace,       ///< payload accesses that no publication orders
  kUnowned,    ///< a slot or region touched outside its owner's turn
  kDeadlock,   ///< no rank can run and one has not finished: a lost wake-up, a missed death, a
               ///< cycle
  kWrongData,  ///< a rank finished and its result is not the exact sum or copy
  kBadStop,    ///< a rank stopped without a reason, or although its condition had been published
};

struct Violation {
  ViolationKind kind;
  std::string text;
};

const char* name_of(ViolationKind kind);

inline constexpr int kMaxRanks = 4;
inline constexpr int kMaxWords = 32;  // 16 cursors: value and sleepers of each
inline constexpr int kMaxCells =
    128;  // payload blocks of 8 bytes, slots and private buffers together
inline constexpr int kMaxDelayedStores = 4;
inline constexpr std::size_t kBlockBytes = 8;

/// Per rank, how many of its publications are known. A rank's own entry counts from 1, so that 0 is
/// "never".
using Clock = std::array<std::uint16_t, kMaxRanks>;

/// The state that the search saves, restores and hashes. No padding, because states are compared as
/// bytes.
struct MemoryState {
  struct Word {
    std::uint64_t value;
    Clock clock;  ///< of the store that wrote `value`; zero after a relaxed one
  };
  struct DelayedStore {
    std::uint64_t word_idx;
    std::uint64_t value;
    Clock clock;
  };
  struct StoreBuffer {
    std::uint64_t num_stores;
    std::array<DelayedStore, kMaxDelayedStores> stores;  ///< oldest first; zero after num_stores
  };
  struct Cell {
    std::uint64_t value;
    Clock read_epochs;  ///< per rank its own clock at its last read since the last write
    std::uint32_t write_epoch;
    std::uint32_t writer;  ///< rank of the last write
  };
  std::array<Clock, kMaxRanks> clocks;
  std::array<StoreBuffer, kMaxRanks> buffers;
  std::array<Word, kMaxWords> words;
  std::array<Cell, kMaxCells> cells;
};
static_assert(std::has_unique_object_representations_v<MemoryState>);

enum class Order { kRelaxed, kRelease, kSeqCst };

/// The memory of the checked machine.
///
/// Words (cursors): total store order. Release and relaxed stores wait in their rank's FIFO buffer
/// and become visible by a transition of their own, so that later loads of the same rank overtake
/// them; sequentially consistent ones drain the buffer. Every store except a relaxed one passes its
/// rank's clock to its readers. `sleepers` words pass none, because the cursors alone must order
/// the payload.
///
/// Cells (payload): visible immediately, but checked for happens-before: a read must be ordered
/// after the last write, a write after the last write and all reads. This detects a race in either
/// order of its two sides.
class Memory {
 public:
  // ---- configuration, before the search
  void clear(int num_ranks);
  Cursor* add_cursors(int num_cursors, std::vector<std::string> names);
  /// Cells that only `rank` may touch: its user's buffer. No clock, no scheduling point.
  std::byte* add_private(int rank, int num_blocks, const std::string& name);
  std::byte* add_shared(int num_blocks, const std::string& name);
  /// The first block beside each of the cursors, in their order; one group of cursors at most.
  void add_payload(Cursor* first, int num_cursors, const std::string& name);
  /// The `num_slots` slots at `slots` alternate between sender and receiver, according to tail and
  /// head.
  void own_as_link(std::byte* slots, int num_slots, int slot_blocks, const Cursor& tail,
                   const Cursor& head, int sender, int receiver);
  /// All ranks read the two regions of `writer` at `regions`, according to the cursors: two per
  /// rank or, with copies, one per rank for each reader.
  void own_as_board(std::byte* regions, int region_blocks, const Cursor* published, int writer,
                    bool has_copies);
  void poke(const std::byte* block, std::uint64_t value) {
    state.cells[cell_idx(block)].value = value;
  }

  // ---- operations
  std::uint64_t load(int rank, int word_idx, bool acquires);
  void store(int rank, int word_idx, std::uint64_t value, Order order);
  void add(int rank, int word_idx, std::int32_t delta);
  bool has_delayed(int rank) const { return state.buffers[rank].num_stores != 0; }
  /// Makes the oldest delayed store of the rank visible.
  void flush_one(int rank);
  void flush_all(int rank);
  std::uint64_t read(int rank, int cell_idx);
  void write(int rank, int cell_idx, std::uint64_t value);

  // ---- looking, without being part of the checked program
  std::uint64_t peek(int word_idx) const { return state.words[word_idx].value; }
  std::uint64_t peek(const std::byte* block) const { return state.cells[cell_idx(block)].value; }
  int word_idx(const void* word) const;
  int cell_idx(const void* block) const;
  bool is_private(int cell_idx) const { return cell_infos_[cell_idx].private_rank >= 0; }
  const std::string& word_name(int word_idx) const { return word_names_[word_idx]; }
  const std::string& cell_name(int cell_idx) const { return cell_infos_[cell_idx].name; }
  /// Fingerprint of the state, up to differences of clocks that no later access can tell; see
  /// fingerprint.cc.
  std::uint64_t hash(std::uint64_t seed) const;

  MemoryState state;
  std::optional<Violation> violation;
  bool checks_owner = true;

 private:
  struct CellInfo {
    std::string name;
    int private_rank = -1;
    int owner_idx = -1;  ///< into owners_
    int slot_idx = 0;    ///< of a link's slots, or the parity of a board's region
  };
  struct Owner {
    bool is_link;
    int writer, reader;  // reader: links only
    int tail_word_idx,
        head_word_idx;  // boards: tail is the first cursor
    std::uint64_t num_slots;
    bool has_copies = false;
  };

  /// The two ends of a link's slots; access by another rank is an error regardless of the clocks.
  bool may_touch(const CellInfo& info, int rank) const;
  bool is_known(const CellInfo& info, int rank, std::uint64_t epoch) const;
  std::array<std::uint64_t, kMaxRanks> relevant_epochs() const;
  std::uint64_t hash_cell(std::uint64_t hash, int cell_idx,
                          const std::array<std::uint64_t, kMaxRanks>& relevant) const;
  std::uint64_t seen_by(int rank, int word_idx) const;
  void check_owner(int rank, int cell_idx, const char* verb);
  bool owns_link(const Owner& owner, int rank, std::uint64_t slot_idx) const;
  bool owns_region(const Owner& owner, int rank, std::uint64_t parity) const;
  void report(ViolationKind kind, int rank, int cell_idx, const std::string& what);
  std::byte* add_cells(int num_blocks, const std::string& name, int private_rank);

  int num_ranks_ = 0;
  int num_words_ = 0;
  int num_cells_ = 0;
  Cursor* payload_begin_ = nullptr;  ///< the cursors beside which something is published
  int num_payloads_ = 0;
  int payload_cell_idx_ = 0;  ///< of the first one
  std::array<std::string, kMaxWords> word_names_;
  std::array<CellInfo, kMaxCells> cell_infos_;
  std::vector<Owner> owners_;
  // Addresses by which protocols name words and cells; the values are in `state`.
  std::array<Cursor, kMaxWords / 2> cursors_;
  alignas(64) std::array<std::byte, kMaxCells * kBlockBytes> payload_;
};

/// Order-dependent mixing for 64-bit fingerprints of states. The constant added first keeps zeros
/// from being absorbed: without it an observation of 0 by operation 0 of word 0 leaves the
/// fingerprint as it was.
constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash + 0x9e3779b97f4a7c15ull) ^ value;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9ull;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebull;
  return hash ^ (hash >> 31);
}

}  // namespace ringcomm::checker
