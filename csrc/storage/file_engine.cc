#include "storage/file_engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace ringcomm {
namespace {

// A thread handles one block at a time and needs a stack; more threads than this bring no gain.
constexpr unsigned kMaxThreads = 4;

void work_on(BlockQueue& queue) {
  while (const auto block = queue.pop()) block->transfer->finish_block(run_block(*block));
}

}  // namespace

int run_block(const FileBlock& block) {
  std::size_t num_done = 0;
  while (num_done < block.num_bytes) {
    char* data = block.data + num_done;
    const std::size_t num_left = block.num_bytes - num_done;
    const off_t offset = block.offset + static_cast<off_t>(num_done);
    const ssize_t result = block.is_write ? ::pwrite(block.fd, data, num_left, offset)
                                          : ::pread(block.fd, data, num_left, offset);
    if (result < 0 && errno == EINTR) continue;
    if (result < 0) return errno;
    if (result == 0) return block.is_write ? ENOSPC : FileTransfer::kEndOfFile;
    num_done += static_cast<std::size_t>(result);
  }
  return 0;
}

FileEngine::FileEngine(const std::string& kind, unsigned queue_depth, std::size_t block_bytes)
    : block_bytes_(block_bytes) {
  if (queue_depth == 0 || block_bytes == 0)
    throw std::invalid_argument("queue_depth and block_bytes must be positive");
  if (kind == "io_uring") {
    workers_->threads.push_back(start_uring_thread(workers_->queue, queue_depth));
  } else if (kind == "threads") {
    start_threads(std::min(queue_depth, kMaxThreads));
  } else {
    throw std::invalid_argument("engine must be \"io_uring\" or \"threads\", got \"" + kind + "\"");
  }
}

// One thread is enough: where a limit allows no more, those that there are do the work.
void FileEngine::start_threads(unsigned num_threads) {
  std::vector<BackgroundThread>& threads = workers_->threads;
  threads.reserve(num_threads);
  while (threads.size() < num_threads) {
    try {
      threads.push_back(
          start_background_thread("ringcomm-file", [&queue = workers_->queue] { work_on(queue); }));
    } catch (const std::system_error&) {
      if (threads.empty()) throw;
      return;
    }
  }
}

FileEngine::~FileEngine() {
  if (generation_ != process_generation()) {
    static_cast<void>(workers_.release());
    return;
  }
  workers_->queue.close();
  for (BackgroundThread& thread : workers_->threads) thread.join();
}

std::shared_ptr<FileTransfer> FileEngine::start(bool is_write, int fd, void* data,
                                                std::size_t num_bytes, off_t offset) {
  if (generation_ != process_generation())
    throw std::runtime_error(
        "ringcomm: this process was forked from the one that opened the file engine, and has none "
        "of its threads; open files after forking");
  const std::size_t num_blocks = (num_bytes + block_bytes_ - 1) / block_bytes_;
  auto transfer = std::make_shared<FileTransfer>(num_blocks);
  for (std::size_t i = 0; i < num_blocks; ++i) {
    const std::size_t begin = i * block_bytes_;
    workers_->queue.push({.is_write = is_write,
                          .fd = fd,
                          .data = static_cast<char*>(data) + begin,
                          .num_bytes = std::min(block_bytes_, num_bytes - begin),
                          .offset = offset + static_cast<off_t>(begin),
                          .transfer = transfer});
  }
  return transfer;
}

}  // namespace ringcomm
