// Asynchronous reads and writes of files in blocks, with every available engine.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "storage/file_engine.h"
#include "third_party/doctest/doctest.h"

namespace {

using namespace ringcomm;

constexpr std::size_t kBlockBytes = 4096;

// Open for reading and writing, without a name.
class ScratchFile {
 public:
  ScratchFile() {
    std::string path = "/tmp/ringcomm-test-XXXXXX";
    fd_ = ::mkstemp(path.data());
    REQUIRE(fd_ >= 0);
    ::unlink(path.c_str());
  }
  ~ScratchFile() { ::close(fd_); }
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

std::vector<std::string> kinds() {
  std::vector<std::string> found = {"threads"};
  try {
    const FileEngine engine("io_uring", 1, 1);
    found.push_back("io_uring");
  } catch (const std::runtime_error&) {
    MESSAGE("without io_uring here");
  }
  return found;
}

std::vector<char> pattern(std::size_t num_bytes, int seed) {
  std::vector<char> bytes(num_bytes);
  for (std::size_t i = 0; i < num_bytes; ++i)
    bytes[i] = static_cast<char>(i * 131 + i / 251 + static_cast<std::size_t>(seed));
  return bytes;
}

TEST_CASE("what was written is read, whatever the size and the place") {
  for (const std::string& kind : kinds()) {
    CAPTURE(kind);
    FileEngine engine(kind, 4, kBlockBytes);
    const ScratchFile file;
    off_t offset = 3;
    for (const std::size_t size : {0UL, 1UL, 511UL, 513UL, kBlockBytes - 1, kBlockBytes,
                                   kBlockBytes + 1, 5 * kBlockBytes, 7 * kBlockBytes + 13}) {
      CAPTURE(size);
      std::vector<char> written = pattern(size, static_cast<int>(size));
      std::vector<char> read(size);
      CHECK(engine.start(true, file.fd(), written.data(), size, offset)->wait() == 0);
      CHECK(engine.start(false, file.fd(), read.data(), size, offset)->wait() == 0);
      CHECK(read == written);
      offset += static_cast<off_t>(size);
    }
  }
}

TEST_CASE("transfers of many threads are all done, and nothing else is touched") {
  constexpr int kNumThreads = 4;
  constexpr int kNumTransfers = 25;
  constexpr std::size_t kBytes = 3 * kBlockBytes + 5;
  for (const std::string& kind : kinds()) {
    CAPTURE(kind);
    FileEngine engine(kind, 8, kBlockBytes);
    const ScratchFile file;
    std::vector<int> num_wrong(kNumThreads, 0);
    std::vector<std::thread> threads;
    for (int t = 0; t < kNumThreads; ++t)
      threads.emplace_back([&, t] {
        std::vector<std::vector<char>> written, read(kNumTransfers, std::vector<char>(kBytes));
        std::vector<std::shared_ptr<FileTransfer>> transfers;
        const auto place = [&](int i) {
          return static_cast<off_t>(kBytes) * (t * kNumTransfers + i);
        };
        for (int i = 0; i < kNumTransfers; ++i) written.push_back(pattern(kBytes, 1000 * t + i));
        for (int i = 0; i < kNumTransfers; ++i)
          transfers.push_back(engine.start(true, file.fd(), written[i].data(), kBytes, place(i)));
        for (const auto& transfer : transfers) num_wrong[t] += transfer->wait() != 0;
        transfers.clear();
        for (int i = 0; i < kNumTransfers; ++i)
          transfers.push_back(engine.start(false, file.fd(), read[i].data(), kBytes, place(i)));
        for (int i = 0; i < kNumTransfers; ++i)
          num_wrong[t] += transfers[i]->wait() != 0 || read[i] != written[i];
      });
    for (std::thread& thread : threads) thread.join();
    CHECK(std::accumulate(num_wrong.begin(), num_wrong.end(), 0) == 0);
  }
}

TEST_CASE("errors are reported, and end nothing else") {
  for (const std::string& kind : kinds()) {
    CAPTURE(kind);
    FileEngine engine(kind, 2, kBlockBytes);
    const ScratchFile file;
    std::vector<char> bytes = pattern(10 * kBlockBytes, 1);
    const auto run = [&](bool is_write, int fd, off_t offset) {
      return engine.start(is_write, fd, bytes.data(), bytes.size(), offset)->wait();
    };
    CHECK(run(true, -1, 0) == EBADF);
    CHECK(run(false, file.fd(), 0) == FileTransfer::kEndOfFile);
    CHECK(run(true, file.fd(), 0) == 0);
    CHECK(run(false, file.fd(), 1) == FileTransfer::kEndOfFile);
    const int read_only = ::open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    CHECK(run(true, read_only, 0) == EBADF);
    ::close(read_only);
    const int full = ::open("/dev/full", O_RDWR | O_CLOEXEC);
    if (full >= 0) {
      CHECK(run(true, full, 0) == ENOSPC);
      ::close(full);
    }
    CHECK(run(true, file.fd(), 5) == 0);
  }
}

TEST_CASE("several may wait for one transfer") {
  for (const std::string& kind : kinds()) {
    FileEngine engine(kind, 2, kBlockBytes);
    const ScratchFile file;
    std::vector<char> bytes = pattern(64 * kBlockBytes, 2);
    const auto transfer = engine.start(true, file.fd(), bytes.data(), bytes.size(), 0);
    std::vector<int> found(3, -2);
    std::vector<std::thread> threads;
    for (int& result : found) threads.emplace_back([&] { result = transfer->wait(); });
    for (std::thread& thread : threads) thread.join();
    CHECK(std::count(found.begin(), found.end(), 0) == 3);
    CHECK(transfer->is_done());
  }
}

TEST_CASE("an engine ends when its transfers have") {
  for (const std::string& kind : kinds()) {
    CAPTURE(kind);
    const ScratchFile file;
    std::vector<char> bytes = pattern(200 * kBlockBytes, 3);
    std::shared_ptr<FileTransfer> transfer;
    {
      FileEngine engine(kind, 3, kBlockBytes);
      transfer = engine.start(true, file.fd(), bytes.data(), bytes.size(), 0);
    }
    CHECK(transfer->is_done());
    CHECK(transfer->wait() == 0);
  }
}

TEST_CASE("options that make no engine are refused") {
  CHECK_THROWS_AS(FileEngine("threads", 0, 1), std::invalid_argument);
  CHECK_THROWS_AS(FileEngine("threads", 1, 0), std::invalid_argument);
  CHECK_THROWS_AS(FileEngine("aio", 1, 1), std::invalid_argument);
  if (!FileEngine::has_uring()) CHECK_THROWS_AS(FileEngine("io_uring", 1, 1), std::runtime_error);
}

#ifndef __SANITIZE_THREAD__  // which forbids threads in a forked child
// The child has none of the threads, and condition variables that count them as waiters.
TEST_CASE("a forked child ends, can use its own engines, and gets an error for the parent's") {
  const ScratchFile file;
  auto engine = std::make_unique<FileEngine>("threads", 2, kBlockBytes);
  std::vector<char> bytes(kBlockBytes);
  CHECK(engine->start(true, file.fd(), bytes.data(), bytes.size(), 0)->wait() == 0);
  FileTransfer under_way(1);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(20);
    int num_wrong = 0;
    const auto is_told = [](const auto& body) {
      try {
        body();
      } catch (const std::runtime_error& error) {
        return std::string(error.what()).find("forked") != std::string::npos;
      }
      return false;
    };
    num_wrong += !is_told([&] { engine->start(true, file.fd(), bytes.data(), bytes.size(), 0); });
    num_wrong += !is_told([&] { under_way.wait(); });
    num_wrong += under_way.is_done();
    engine.reset();
    FileEngine own("threads", 2, kBlockBytes);
    num_wrong += own.start(true, file.fd(), bytes.data(), bytes.size(), 0)->wait() != 0;
    ::_exit(num_wrong);
  }
  int status = -1;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  CHECK(status == 0);
  CHECK(engine->start(true, file.fd(), bytes.data(), bytes.size(), 0)->wait() == 0);
}
#endif

}  // namespace
