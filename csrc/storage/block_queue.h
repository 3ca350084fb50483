#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "transport/process.h"

namespace ringcomm {

/// A read or write of a file that is under way: done when all of its blocks are. Without a lock,
/// which a thread might hold while another one forks.
class FileTransfer {
 public:
  explicit FileTransfer(std::size_t num_blocks) : num_left_(static_cast<int>(num_blocks)) {}

  /// The error of a block at the end of the file, in place of an errno.
  static constexpr int kEndOfFile = -1;

  /// Records that a block is done, and keeps the first error. Any thread.
  void finish_block(int error) {
    int none = 0;
    error_.compare_exchange_strong(none, error);
    if (num_left_.fetch_sub(1) == 1) num_left_.notify_all();
  }

  /// Blocks; returns 0, the errno of the first block that failed, or kEndOfFile. Any thread. Throws
  /// std::runtime_error in a forked child where the transfer was under way at the fork: the
  /// parent's threads finish it, and the child does not see that.
  int wait() {
    for (int left = num_left_; left != 0; left = num_left_) {
      if (generation_ != process_generation())
        throw std::runtime_error(
            "ringcomm: this file transfer was in progress when the process was forked, and "
            "completes "
            "in the parent only; wait for transfers before forking");
      num_left_.wait(left);
    }
    return error_;
  }

  bool is_done() const { return num_left_ == 0; }

 private:
  const int generation_ = process_generation();
  std::atomic<int> num_left_;
  std::atomic<int> error_ = 0;
};

/// A part of a transfer: one file system operation, or several if it transfers less than requested.
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
