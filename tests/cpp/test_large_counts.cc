// More than 2^31 elements in little memory: address space in which one MiB of pages is mapped
// repeatedly. The last part has its own pages, which show whether it was reached.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "core/chunk_layout.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using testing::expect;

constexpr std::size_t kMib = std::size_t{1} << 20;

// ---- the arithmetic alone

constexpr std::size_t kHuge = (std::size_t{5} << 32) + 3;  // elements
constexpr ChunkLayout kLayout(kHuge, 3);
static_assert(kLayout.chunk(2).end_elems() == kHuge);
static_assert(kLayout.chunk(1).begin_elems == kLayout.chunk(0).num_elems);
static_assert(num_slices(kHuge, kMib) == (std::size_t{5} << 12) + 1);
static_assert(slice_of({0, kHuge}, std::size_t{5} << 12, kMib) ==
              ElemRange{std::size_t{5} << 32, 3});
static_assert(slice_of({kHuge, kHuge}, std::size_t{3} << 12, kMib).begin_elems ==
              kHuge + (std::size_t{3} << 32));

// ---- calls

class RepeatedMemory {
 public:
  explicit RepeatedMemory(std::size_t num_bytes) : num_bytes_(num_bytes / kMib * kMib + kMib) {
    fd_ = ::memfd_create("repeated", 0);
    if (fd_ < 0 || ::ftruncate(fd_, 2 * kMib) != 0) throw std::runtime_error("memfd_create");
    // A place for all, and then the pages.
    void* place =
        ::mmap(nullptr, num_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) throw std::runtime_error("mmap");
    begin_ = static_cast<std::byte*>(place);
    for (std::size_t offset = 0; offset < num_bytes_; offset += kMib) {
      const bool is_last = offset + kMib == num_bytes_;
      if (::mmap(begin_ + offset, kMib, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_,
                 is_last ? static_cast<off_t>(kMib) : 0) == MAP_FAILED)
        throw std::runtime_error("mmap of a page");
    }
  }
  ~RepeatedMemory() {
    ::munmap(begin_, num_bytes_);
    ::close(fd_);
  }
  RepeatedMemory(const RepeatedMemory&) = delete;
  RepeatedMemory& operator=(const RepeatedMemory&) = delete;

  std::byte* data() { return begin_; }
  std::byte* last() { return begin_ + num_bytes_ - kMib; }

 private:
  std::size_t num_bytes_;
  int fd_ = -1;
  std::byte* begin_ = nullptr;
};

// The sanitizers' own memory grows with the address space that is touched.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST_CASE("2^31 elements and some more reach their last place") {
  constexpr std::size_t kElems = (std::size_t{1} << 31) + 5;
  for (const OpKind op : {OpKind::kBroadcast, OpKind::kAllToAll}) {
    testing::run_ranks(2, [&](Communicator& communicator) {
      const bool is_source = communicator.rank() == 0;
      RepeatedMemory memory(kElems);
      std::memset(memory.data(), is_source ? 1 : 0, kMib);
      std::memset(memory.last(), is_source ? 2 : 0, kMib);
      // An all_to_all with all data from rank 0 to rank 1.
      const std::vector<std::size_t> given = {0, is_source ? kElems : 0};
      const std::vector<std::size_t> taken = {is_source ? 0 : kElems, 0};
      const void* inputs[] = {memory.data(), memory.data()};
      void* outputs[] = {memory.data(), memory.data()};
      const bool is_uneven = op == OpKind::kAllToAll;
      communicator.run({{.num_elems = is_uneven ? 0 : kElems, .root = is_uneven ? -1 : 0, .op = op},
                        inputs,
                        outputs,
                        is_uneven ? given.data() : nullptr,
                        is_uneven ? taken.data() : nullptr},
                       testing::kPatient);
      expect(memory.data()[kMib - 1] == std::byte{1}, "the first MiB");
      expect(memory.last()[4] == std::byte{2}, "the last element");
      expect(memory.last()[5] == (is_source ? std::byte{2} : std::byte{0}), "nothing behind it");
    });
  }
}
#endif

}  // namespace
