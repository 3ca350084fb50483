#include "transport/shm/block_list.h"

#include <iterator>

namespace ringcomm::shm {

BlockList::BlockList(std::size_t num_bytes) { add_free(0, num_bytes); }

std::optional<std::size_t> BlockList::allocate(std::size_t num_bytes, std::size_t alignment_bytes) {
  // The shortest range that is long enough is too short where its start is not aligned: then the
  // next one.
  for (auto fit = free_by_size_.lower_bound({num_bytes, 0}); fit != free_by_size_.end(); ++fit) {
    const auto [range_bytes, begin] = *fit;
    const std::size_t offset = (begin + alignment_bytes - 1) & ~(alignment_bytes - 1);
    const std::size_t skipped_bytes = offset - begin;
    if (range_bytes < skipped_bytes + num_bytes) continue;
    remove_free(free_.find(begin));
    if (skipped_bytes > 0) add_free(begin, skipped_bytes);
    const std::size_t left_bytes = range_bytes - skipped_bytes - num_bytes;
    if (left_bytes > 0) add_free(offset + num_bytes, left_bytes);
    used_.emplace(offset, num_bytes);
    return offset;
  }
  return std::nullopt;
}

std::size_t BlockList::deallocate(std::size_t offset) {
  const auto block = used_.find(offset);
  const std::size_t num_bytes = block->second;
  used_.erase(block);
  std::size_t begin = offset;
  std::size_t end = offset + num_bytes;
  const auto next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      remove_free(previous);
    }
  }
  if (next != free_.end() && next->first == end) {
    end += next->second;
    remove_free(next);
  }
  add_free(begin, end - begin);
  return num_bytes;
}

std::optional<std::size_t> BlockList::block_around(std::size_t offset) const {
  const auto next = used_.upper_bound(offset);
  if (next == used_.begin()) return std::nullopt;
  const auto [begin, num_bytes] = *std::prev(next);
  if (offset - begin >= num_bytes) return std::nullopt;
  return begin;
}

void BlockList::add_free(std::size_t offset, std::size_t num_bytes) {
  free_.emplace(offset, num_bytes);
  free_by_size_.emplace(num_bytes, offset);
}

void BlockList::remove_free(std::map<std::size_t, std::size_t>::iterator range) {
  free_by_size_.erase({range->second, range->first});
  free_.erase(range);
}

}  // namespace ringcomm::shm
