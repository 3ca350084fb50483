#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/collectives/device_group.h"
#include "cuda/collectives/events.h"
#include "cuda/collectives/launches.h"
#include "cuda/driver/device_memory.h"

namespace ringcomm::cuda {

/// Allocations of the ranks' own programs, such as the segments of torch's caching allocator, or
/// the pieces of which its expandable segments are made, in which peers access the buffers of
/// collectives directly: announced in the group's host memory by the call after the first that uses
/// one, mapped by the peers' next calls, then lent, and retired when the driver's number of the
/// allocation has changed (docs/design/gpu.md, "Buffers in place"). What cannot be mapped is
/// staged.
///
/// find_places(), map_now(), has_news() and follow() by one thread at a time.
class PeerAllocations {
 public:
  static constexpr std::size_t kMaxRows = GroupWords::kMaxAllocations;

  PeerAllocations(RecordExchange& exchange, DeviceGroup& group);
  ~PeerAllocations();

  /// Where kernels find each rank's allocation of each row (GroupFrame::bases).
  std::byte* const* bases() const { return reinterpret_cast<std::byte* const*>(bases_.data()); }

  /// Sets the places of buffers of this rank, in a call that is about to be launched: 0 where peers
  /// have not mapped one. `number`: of the call among the group's. `asked`: whatever the group
  /// maps.
  void find_places(std::uint64_t number, std::vector<PeerBuffer>& buffers, bool asked = false);
  /// Collective: maps a buffer of each rank before its first call. Returns whether all ranks can
  /// use those of all. Throws Error if a rank does not arrive.
  bool map_now(const std::byte* data, std::size_t num_bytes, std::uint64_t number);
  bool has_news();
  const char* why_staged() const { return why_staged_; }
  /// Unmaps what peers have retired, if it may, which waits for the kernels of this process. Maps
  /// what they have announced, and announces what this rank's last calls used.
  void follow(std::uint64_t call, bool may_unmap);

  /// By the watchdog, again and again: retires what has been freed if no call does, and unmaps what
  /// peers have retired.
  void look() noexcept;
  /// Retires all that this process has freed and unmaps all that peers have, in all groups. Waits
  /// until peers have unmapped it as well. False if one had not in time. From any thread.
  static bool release(std::chrono::milliseconds patience);

 private:
  struct Own {
    std::uint64_t id = 0;  // 0: free
    DevicePtr base = 0;
    std::shared_ptr<const MappedPiece> piece = nullptr;
    std::unique_ptr<host::Offer> offer = nullptr;  // of the piece: see end_offers()
  };
  struct Theirs {
    std::uint64_t version = 0;
    bool has_failed = false;
    std::shared_ptr<PeerMappings::Mapping> mapping = nullptr;  // null in the owner's own process
  };

  Place place_of(const Allocation& allocation, std::uint64_t number, bool is_wanted);
  void write_base(std::size_t row, int rank, std::byte* base);
  GroupWords::OfAllocation& row_of(int rank, std::size_t row) const {
    return group_.words().allocations[rank][row];
  }
  std::size_t find(std::uint64_t id) const;
  void announce(const std::byte* data);
  void end_offers();
  std::size_t free_row() const;
  bool is_freed(std::size_t row) const;
  void retire_if_freed(std::size_t row);
  void publish(std::size_t row);
  bool is_known_to_all(std::size_t row) const;

  template <class Body>
  void for_news(bool exists, const Body& body);
  bool has_retired();
  void unmap_retired();
  void map(int rank, std::size_t row, std::uint64_t call);
  bool release();

  RecordExchange& exchange_;
  DeviceGroup& group_;
  int rank_;
  int world_size_;
  PeerMappings& mappings_;
  RunningKernels& running_;

  std::mutex mutex_;  // guards what follows
  DeviceMemory bases_;
  std::vector<Own> own_;  // by row
  std::vector<std::vector<Theirs>> theirs_;
  std::vector<const std::byte*> wanted_;  // buffers in no row
  const char* why_staged_ = nullptr;      // some buffer; the last reason
  std::uint64_t num_failures_ = 0;        // to announce, one after the other
  std::uint64_t num_published_ = 0;       // versions of this rank's rows
  std::uint32_t silent_ranks_ = 0;        // that have sent no descriptor in this call
  std::uint64_t num_followed_ = 0;        // versions
  bool has_postponed_ = false;            // some of these are to be unmapped
  int num_failed_ = 0;                    // rows of peers that could not be mapped
  std::uint64_t num_waits_ = 0;           // for the next attempt
  std::uint64_t num_looks_ = 0;           // at rows of this rank by calls, in turn
  // Of the watchdog:
  std::uint64_t num_looks_seen_ = 0;
  int num_idle_ = 0;
  std::size_t next_row_ = 0;
  std::uint64_t num_seen_ = 0;  // versions without any that is to be unmapped
};

}  // namespace ringcomm::cuda
