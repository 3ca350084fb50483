#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/collectives/record_exchange.h"
#include "cuda/driver/device_memory.h"
#include "transport/shm/bootstrap.h"
#include "transport/shm/fd.h"

namespace ringcomm::cuda {

/// A file descriptor that other ranks' processes can fetch while this object lives.
class Offer {
 public:
  explicit Offer(shm::UniqueFd fd);
  ~Offer() { shm::Bootstrap::instance().withdraw(key_); }
  Offer(const Offer&) = delete;
  Offer& operator=(const Offer&) = delete;

  const std::string& key() const { return key_; }
  /// Fetches what a rank's process offers. Throws Error.
  static shm::UniqueFd fetch(const RankPlace& place, int rank, const std::string& key);

 private:
  std::string key_;
};

/// Memory that this rank has exported by IPC handles. It is kept until no peer has it open, because
/// freeing it earlier is undefined in CUDA.
///
/// A rank reports in the group's host memory that it has closed everything that it had opened. An
/// owner frees its exports when all peers have reported this or have died. An export that a live
/// peer still has open after kPatience is leaked until this process ends.
///
/// Memory by file descriptors needs none of this: the driver counts its users.
class Exports {
 public:
  /// `words` outlive this object.
  Exports(GroupWords& words, int rank, const std::vector<RankPlace>& places);
  /// After all that this rank has opened in the group is closed. Waits for kPatience at most.
  ~Exports();
  Exports(const Exports&) = delete;
  Exports& operator=(const Exports&) = delete;

  /// Call it at the export.
  void keep(std::shared_ptr<DeviceMemory> exported) { exported_.push_back(std::move(exported)); }
  /// All peers have closed it, or never opened it.
  void drop(const std::shared_ptr<DeviceMemory>& exported) { std::erase(exported_, exported); }

 private:
  bool all_have_closed() const;

  GroupWords& words_;
  std::size_t rank_;
  /// The ranks' processes; null for ranks of this process, which open nothing.
  std::vector<std::shared_ptr<PeerProcess>> peers_;
  std::vector<std::shared_ptr<DeviceMemory>> exported_;
};

/// Memory of which every rank of a group has a part on its device, and which all have mapped.
class Segment {
 public:
  /// Collective; `num_bytes` may differ between ranks. `exports` belongs to the group, as does
  /// `word`: eight bytes that outlive this object, because freeing them waits for all work on the
  /// GPU. Throws Unavailable, with the same reason on all ranks, if the memory cannot be allocated
  /// or mapped, or does not have its owner's signature.
  Segment(RecordExchange& exchange, DeviceOrdinal device, const std::vector<RankPlace>& places,
          HandleKind kind, std::size_t num_bytes, Exports& exports, MappedHostMemory& word);

  /// The local address of a rank's part; zeroed at first.
  std::byte* of(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }
  /// The size of this rank's part.
  std::size_t num_bytes() const { return num_bytes_; }
  /// Unmaps the other ranks' parts, which nothing uses any more.
  void close_others() { theirs_.clear(); }
  /// This rank's part alone, which may outlive the segment.
  const std::shared_ptr<DeviceMemory>& own() const { return own_; }

 private:
  struct Part;  // a rank's record of its part

  Part make_own(RecordExchange& exchange, HandleKind kind, Exports& exports);
  void map(int peer, const RankPlace& place, const Part& part);

  DeviceOrdinal device_;
  std::size_t num_bytes_;
  MappedHostMemory& word_;
  std::shared_ptr<DeviceMemory> own_;
  /// The other ranks' memory: mapped, or the memory itself if the rank is a thread of this process.
  std::vector<std::shared_ptr<DeviceMemory>> theirs_;
  std::vector<std::byte*> parts_;
  std::optional<Offer> offer_;  // until all have mapped it
};

}  // namespace ringcomm::cuda
