#include "storage/file_engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "transport/background_thread.h"

namespace ringcomm {
namespace {

// A thread does one block at a time, and asks for a stack; more of them than this bring nothing.
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
    throw std::invalid_argument("queue_depth and block_bytes are positive");
  if (kind == "io_uring") {
    threads_.push_back(start_uring_thread(queue_, queue_depth));
  } else if (kind == "threads") {
    for (unsigned i = 0; i < std::min(queue_depth, kMaxThreads); ++i)
      threads_.push_back(start_background_thread("ringcomm-file", [this] { work_on(queue_); }));
  } else {
    throw std::invalid_argument("an engine is \"io_uring\" or \"threads\", got \"" + kind + "\"");
  }
}

FileEngine::~FileEngine() {
  queue_.close();
  for (std::thread& thread : threads_) thread.join();
}

std::shared_ptr<FileTransfer> FileEngine::start(bool is_write, int fd, void* data,
                                                std::size_t num_bytes, off_t offset) {
  const std::size_t num_blocks = (num_bytes + block_bytes_ - 1) / block_bytes_;
  auto transfer = std::make_shared<FileTransfer>(num_blocks);
  for (std::size_t i = 0; i < num_blocks; ++i) {
    const std::size_t begin = i * block_bytes_;
    queue_.push({.is_write = is_write,
                 .fd = fd,
                 .data = static_cast<char*>(data) + begin,
                 .num_bytes = std::min(block_bytes_, num_bytes - begin),
                 .offset = offset + static_cast<off_t>(begin),
                 .transfer = transfer});
  }
  return transfer;
}

}  // namespace ringcomm
