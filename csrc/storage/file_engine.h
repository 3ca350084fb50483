#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "storage/block_queue.h"
#include "transport/process.h"

namespace ringcomm {

/// Reads and writes files asynchronously: transfers are split into blocks, several of which are in
/// flight.
///
/// For files opened with O_DIRECT, block_bytes and the addresses, offsets and sizes of transfers
/// must be multiples of the file system's alignment; the engine does not check this.
///
/// A forked child cannot use an engine, because its threads are the parent's. There start() throws
/// and the destructor returns immediately.
class FileEngine {
 public:
  /// `kind` is "io_uring" or "threads". Throws std::invalid_argument for another one and for values
  /// that are 0, std::runtime_error where this build or this kernel lacks io_uring.
  FileEngine(const std::string& kind, unsigned queue_depth, std::size_t block_bytes);
  /// Ends when all transfers have.
  ~FileEngine();
  FileEngine(const FileEngine&) = delete;
  FileEngine& operator=(const FileEngine&) = delete;

  /// Whether io_uring was there to compile with.
  static bool has_uring();

  /// Starts a transfer. The memory has to stay until it is done. Throws std::runtime_error in a
  /// forked child.
  std::shared_ptr<FileTransfer> start(bool is_write, int fd, void* data, std::size_t num_bytes,
                                      off_t offset);

 private:
  void start_threads(unsigned num_threads);

  struct Workers {
    BlockQueue queue;
    std::vector<BackgroundThread> threads;
  };

  const std::size_t block_bytes_;
  const int generation_ = process_generation();
  // Leaked in a forked child: the queue may be locked, and counts the parent's threads as waiters.
  std::unique_ptr<Workers> workers_ = std::make_unique<Workers>();
};

/// Does a block with pread() or pwrite(), to the end. Returns what FileTransfer::finish_block
/// takes.
int run_block(const FileBlock& block);

/// A thread with a ring of its own, which works on the queue until that is closed and empty. Throws
/// std::runtime_error as FileEngine does.
BackgroundThread start_uring_thread(BlockQueue& queue, unsigned queue_depth);

}  // namespace ringcomm
