#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace ringcomm::shm {

/// Which bytes of a range are in use: best fit, with adjacent free blocks merged. Works on offsets
/// and accesses no memory. Not thread-safe.
class BlockList {
 public:
  explicit BlockList(std::size_t num_bytes);

  /// The offset of a free block, a multiple of `alignment_bytes` (a power of two); nothing when no
  /// free range is long enough.
  std::optional<std::size_t> allocate(std::size_t num_bytes, std::size_t alignment_bytes);
  /// Frees the block at `offset`; returns its size.
  std::size_t deallocate(std::size_t offset);

  /// The offset of the block in use that contains `offset`; none if it is free.
  std::optional<std::size_t> block_around(std::size_t offset) const;

  /// The free ranges: offset and size.
  const std::map<std::size_t, std::size_t>& free_ranges() const { return free_; }
  std::size_t num_blocks() const { return used_.size(); }

 private:
  void add_free(std::size_t offset, std::size_t num_bytes);
  void remove_free(std::map<std::size_t, std::size_t>::iterator range);

  std::map<std::size_t, std::size_t> free_;                     // size by offset
  std::set<std::pair<std::size_t, std::size_t>> free_by_size_;  // size, then offset
  std::map<std::size_t, std::size_t> used_;                     // size by offset
};

}  // namespace ringcomm::shm
