// io_uring (Axboe 2019), through liburing: one thread keeps many blocks in flight.
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "storage/file_engine.h"

#ifdef RINGCOMM_WITH_URING
#include <liburing.h>

#include <unordered_map>

namespace ringcomm {
namespace {

class Ring {
 public:
  explicit Ring(unsigned queue_depth) : queue_depth_(queue_depth) {
    const int error = -io_uring_queue_init(queue_depth, &ring_, 0);
    if (error != 0)
      throw std::runtime_error(std::string("io_uring is not available: ") + std::strerror(error));
  }
  ~Ring() { io_uring_queue_exit(&ring_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  void work_on(BlockQueue& queue) {
    while (fill_from(queue)) {
      if (const int error = submit_and_reap(); error != 0) fail_all(error);
    }
  }

 private:
  // False when there is nothing to do and never will be.
  bool fill_from(BlockQueue& queue) {
    while (blocks_.size() < queue_depth_) {
      auto block = blocks_.empty() ? queue.pop() : queue.try_pop();
      if (!block.has_value()) break;
      const std::uint64_t id = next_id_++;
      prepare(blocks_.emplace(id, std::move(*block)).first->second, id);
    }
    return !blocks_.empty();
  }

  void prepare(const FileBlock& block, std::uint64_t id) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);  // as many entries as blocks, so never null
    const auto num_bytes = static_cast<unsigned>(block.num_bytes);
    if (block.is_write)
      io_uring_prep_write(entry, block.fd, block.data, num_bytes, block.offset);
    else
      io_uring_prep_read(entry, block.fd, block.data, num_bytes, block.offset);
    entry->user_data = id;
  }

  // Waits for one block at least. Returns the errno of the ring itself.
  int submit_and_reap() {
    int result = 0;
    do {
      result = io_uring_submit_and_wait(&ring_, 1);
    } while (result == -EINTR);
    // Too many requests: completed ones make room.
    if (result < 0 && result != -EAGAIN && result != -EBUSY) return -result;
    io_uring_cqe* entry = nullptr;
    while (io_uring_peek_cqe(&ring_, &entry) == 0) {
      const std::uint64_t id = entry->user_data;
      const int num_done = entry->res;
      io_uring_cqe_seen(&ring_, entry);
      complete(id, num_done);
    }
    return 0;
  }

  void complete(std::uint64_t id, int num_done) {
    const auto found = blocks_.find(id);
    FileBlock& block = found->second;
    if (num_done == 0) return finish(found, block.is_write ? ENOSPC : FileTransfer::kEndOfFile);
    if (num_done == -EINTR || num_done == -EAGAIN) num_done = 0;
    if (num_done < 0) return finish(found, -num_done);
    block.data += num_done;
    block.offset += num_done;
    block.num_bytes -= static_cast<std::size_t>(num_done);
    if (block.num_bytes == 0) return finish(found, 0);
    prepare(block, id);
  }

  using Blocks = std::unordered_map<std::uint64_t, FileBlock>;

  void finish(Blocks::iterator found, int error) {
    const auto transfer = std::move(found->second.transfer);
    blocks_.erase(found);
    transfer->finish_block(error);
  }

  // The ring itself failed, which should not happen: all transfers fail.
  void fail_all(int error) {
    while (!blocks_.empty()) finish(blocks_.begin(), error);
  }

  const unsigned queue_depth_;
  io_uring ring_ = {};
  Blocks blocks_;
  std::uint64_t next_id_ = 0;
};

}  // namespace

bool FileEngine::has_uring() { return true; }

BackgroundThread start_uring_thread(BlockQueue& queue, unsigned queue_depth) {
  auto ring = std::make_shared<Ring>(queue_depth);
  return start_background_thread("ringcomm-uring", [ring, &queue] { ring->work_on(queue); });
}

}  // namespace ringcomm

#else

namespace ringcomm {

bool FileEngine::has_uring() { return false; }

BackgroundThread start_uring_thread(BlockQueue&, unsigned) {
  throw std::runtime_error(
      "this build has no io_uring: install liburing's headers (apt-get install liburing-dev) and "
      "build again");
}

}  // namespace ringcomm

#endif
