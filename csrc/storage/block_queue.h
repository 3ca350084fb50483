#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

namespace ringcomm {

/// A read or write of a file that is under way: done when all of its blocks are.
class FileTransfer {
 public:
  explicit FileTransfer(std::size_t num_blocks) : num_left_(num_blocks) {}

  /// What a block that met the end of the file reports in place of an errno.
  static constexpr int kEndOfFile = -1;

  /// Says that a block is done; the first error stays. Any thread.
  void finish_block(int error) {
    const std::lock_guard lock(mutex_);
    if (error_ == 0) error_ = error;
    if (--num_left_ == 0) done_.notify_all();
  }

  /// Blocks; returns 0, the errno of the first block that failed, or kEndOfFile. Any thread.
  int wait() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return num_left_ == 0; });
    return error_;
  }

  bool is_done() {
    const std::lock_guard lock(mutex_);
    return num_left_ == 0;
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  std::size_t num_left_;
  int error_ = 0;
};

/// A part of a transfer, which is one operation of the file system, or a few where those come back
/// short.
struct FileBlock {
  bool is_write = false;
  int fd = -1;
  char* data = nullptr;
  std::size_t num_bytes = 0;
  off_t offset = 0;
  std::shared_ptr<FileTransfer> transfer;
};

/// Blocks that wait for an engine, first in, first out.
class BlockQueue {
 public:
  void push(FileBlock block) {
    {
      const std::lock_guard lock(mutex_);
      blocks_.push_back(std::move(block));
    }
    changed_.notify_one();
  }

  /// Nothing when the queue is closed and empty; else it blocks until there is a block.
  std::optional<FileBlock> pop() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_closed_ || !blocks_.empty(); });
    return take();
  }

  /// Nothing when the queue is empty.
  std::optional<FileBlock> try_pop() {
    const std::lock_guard lock(mutex_);
    return take();
  }

  /// No more pushes; what is there is still to be popped.
  void close() {
    {
      const std::lock_guard lock(mutex_);
      is_closed_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::optional<FileBlock> take() {
    if (blocks_.empty()) return std::nullopt;
    std::optional<FileBlock> block = std::move(blocks_.front());
    blocks_.pop_front();
    return block;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<FileBlock> blocks_;
  bool is_closed_ = false;
};

}  // namespace ringcomm
