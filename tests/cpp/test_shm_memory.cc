// The parts of a group: memory that can be mapped twice but not resized, descriptors that are sent,
// and the layout.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "children.h"
#include "collectives/recorder.h"
#include "core/errors.h"
#include "host/fd.h"
#include "host/group.h"
#include "host/process.h"
#include "host/rank_record.h"
#include "host/shared_memory.h"
#include "host/unix_socket.h"
#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"

namespace {

using namespace ringcomm;
using namespace ringcomm::host;
using std::chrono::milliseconds;
using testing::error_of;
using testing::expect_error;

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

std::string unused_name(const char* what) {
  return "ringcomm-test-" + std::to_string(::getpid()) + "-" + what;
}

TEST_CASE("a memfd is zeroed, shared by its mappings, and keeps its size") {
  const UniqueFd fd = create_memfd(10'000);
  const SharedMemory one(fd.get(), 10'000);
  const SharedMemory two(fd.get(), 10'000);
  CHECK(one.data() != two.data());
  CHECK(std::all_of(one.data(), one.data() + 10'000, [](std::byte b) { return b == std::byte{}; }));
  one.data()[9'999] = std::byte{42};
  CHECK(two.data()[9'999] == std::byte{42});

  CHECK(::ftruncate(fd.get(), 5'000) != 0);
  CHECK(::ftruncate(fd.get(), 20'000) != 0);
  CHECK(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE) != 0);  // nor can the seals be changed
  CHECK(SharedMemory::of_peer(fd.get()).num_bytes() == 10'000);
  CHECK((::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC) != 0);
}

// What the system refuses later is a SIGBUS. A page past the end of a file is refused like one that
// it has no memory for.
TEST_CASE("pages are taken at once, or it is an error") {
  const std::size_t num_bytes = 3 * page_bytes();
  const UniqueFd fd = create_memfd(num_bytes);
  const SharedMemory memory(fd.get(), num_bytes);
  const bool before = may_refuse_pages().exchange(true);
  reserve_pages(memory.data() + page_bytes() + 5, page_bytes());
  std::array<unsigned char, 3> is_there{};
  REQUIRE(::mincore(memory.data(), num_bytes, is_there.data()) == 0);
  CHECK(is_there == std::array<unsigned char, 3>{0, 1, 1});

  const UniqueFd shrinking(::memfd_create("test", MFD_CLOEXEC));
  REQUIRE(::ftruncate(shrinking.get(), static_cast<off_t>(num_bytes)) == 0);
  const SharedMemory shrunk(shrinking.get(), num_bytes);
  REQUIRE(::ftruncate(shrinking.get(), static_cast<off_t>(page_bytes())) == 0);
  expect_error(error_of([&] { reserve_pages(shrunk.data(), num_bytes); }), ErrorKind::kSystem,
               {"bytes of shared memory", "Cannot allocate memory", "vm.overcommit_ratio"});
  may_refuse_pages() = before;
}

TEST_CASE("a mapping outlives its descriptor, and moves") {
  SharedMemory memory;
  {
    const UniqueFd fd = create_memfd(4096);
    memory = SharedMemory(fd.get(), 4096);
  }
  memory.data()[0] = std::byte{7};
  const SharedMemory moved(std::move(memory));
  CHECK(moved.data()[0] == std::byte{7});
  CHECK(moved.num_bytes() == 4096);
}

TEST_CASE("refusals of the system carry the call, its text and its code") {
  expect_error(error_of([] { SharedMemory(-1, 4096); }), ErrorKind::kSystem,
               {"mmap of 4096 bytes", "Bad file descriptor", "errno 9"});
  expect_error(error_of([] { create_memfd(std::size_t{1} << 63); }), ErrorKind::kSystem,
               {"ftruncate"});
}

TEST_CASE("UniqueFd closes what it owns, once") {
  UniqueFd fd = create_memfd(1);
  const int number = fd.get();
  UniqueFd moved = std::move(fd);
  CHECK(is_open(number));
  UniqueFd& alias = moved;
  moved = std::move(alias);
  CHECK(is_open(number));
  moved.reset();
  CHECK_FALSE(is_open(number));
  CHECK_FALSE(static_cast<bool>(moved));
}

// Where the program has closed its standard output, the first descriptor that is free is 1.
TEST_CASE("a descriptor of ours is never a standard one") {
  const auto num_failures = [] {
    for (int fd = 0; fd < 3; ++fd) ::close(fd);
    int failures = 0;
    const UniqueFd memory = create_memfd(4096);
    UniqueFd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    file.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    failures += memory.get() < 3 || file.get() < 3;
    for (int fd = 0; fd < 3; ++fd) failures += is_open(fd);
    failures += (::fcntl(file.get(), F_GETFD) & FD_CLOEXEC) == 0;
    return failures;
  };
  CHECK(testing::status_of_child(num_failures) == 0);
}

// As after a library that closes all descriptors of the process.
TEST_CASE("a descriptor that has become another file's is left to it") {
  const std::string path = "/tmp/" + unused_name("own");
  UniqueFd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int number = file.get();
  CHECK(file.has_its_file());
  REQUIRE(::close(number) == 0);
  CHECK_FALSE(file.has_its_file());
  const int other = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  REQUIRE(::dup2(other, number) == number);
  UniqueFd moved(std::move(file));
  CHECK_FALSE(moved.has_its_file());
  moved.reset();
  CHECK(is_open(number));
  UniqueFd mine(number), next;
  next = std::move(mine);
  CHECK(next.has_its_file());
  next.reset();
  CHECK_FALSE(is_open(number));
  if (other != number) ::close(other);
  ::unlink(path.c_str());
}

struct Connection {
  UniqueFd client, server;
};

Connection connect_pair(const char* what) {
  const std::string name = unused_name(what);
  const UniqueFd listener = listen_at(name);
  expect_error(error_of([&] { listen_at(name); }), ErrorKind::kSystem, {"bind", name});
  Connection pair;
  pair.client = connect_to(name);
  pair.server = UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  REQUIRE(static_cast<bool>(pair.server));
  return pair;
}

TEST_CASE("texts over a Unix socket keep their bounds") {
  Connection pair = connect_pair("texts");
  CHECK(credentials_of_peer(pair.client.get()).pid == ::getpid());
  CHECK(credentials_of_peer(pair.server.get()).uid == ::geteuid());
  const auto received = [&] { return recv_message(pair.server.get())->text; };
  CHECK_FALSE(recv_message(pair.server.get()).has_value());
  send_message(pair.client.get(), "one");
  send_message(pair.client.get(), std::string(kMaxTextBytes, 'x'));
  send_message(pair.client.get(), std::string(kMaxTextBytes + 1, 'x'));
  CHECK(received() == "one");
  CHECK(received() == std::string(kMaxTextBytes, 'x'));
  CHECK(received().empty());
  pair.client.reset();
  CHECK(received().empty());
  expect_error(error_of([&] { send_message(pair.server.get(), "three"); }), ErrorKind::kSystem,
               {"send"});
}

TEST_CASE("a descriptor over a Unix socket is the same memory") {
  Connection pair = connect_pair("fds");
  const UniqueFd sent = create_memfd(4096);
  send_message(pair.client.get(), "memory", sent.get());
  const auto message = recv_message(pair.server.get());
  REQUIRE(message.has_value());
  CHECK(message->text == "memory");
  const UniqueFd& received = message->fd;
  REQUIRE(static_cast<bool>(received));
  CHECK(received.get() != sent.get());
  CHECK((::fcntl(received.get(), F_GETFD) & FD_CLOEXEC) != 0);
  SharedMemory(sent.get(), 4096).data()[1] = std::byte{9};
  CHECK(SharedMemory(received.get(), 4096).data()[1] == std::byte{9});

  send_message(pair.client.get(), "no descriptor");
  CHECK_FALSE(static_cast<bool>(recv_message(pair.server.get())->fd));
  pair.client.reset();
  CHECK_FALSE(static_cast<bool>(recv_message(pair.server.get())->fd));
}

TEST_CASE("a rank record survives its text, and a stranger's is refused") {
  const RankRecord record{.host_id = "boot:net4026531840",
                          .host = "some\nwhere\\n\\",
                          .bootstrap_address = "ringcomm-0123",
                          .pid = 4711,
                          .memory_key = "",
                          .options = "algorithm=auto num_slots=2",
                          .world_size = 3,
                          .global_ranks = "2, 5-6",
                          .attempt = 7,
                          .cores = "0-3, 8",
                          .failure = {.origin = 1, .culprit = 2, .text = "one\ntwo \\n"}};
  const RankRecord copy = RankRecord::from_text(record.to_text());
  CHECK(copy.host_id == record.host_id);
  CHECK(copy.host == record.host);
  CHECK(copy.bootstrap_address == record.bootstrap_address);
  CHECK(copy.pid == record.pid);
  CHECK(copy.memory_key.empty());
  CHECK(copy.options == record.options);
  CHECK(copy.world_size == 3);
  CHECK(copy.global_ranks == record.global_ranks);
  CHECK(copy.attempt == 7);
  CHECK(copy.cores == record.cores);
  CHECK(copy.failure.culprit == 2);
  CHECK(copy.failure.text == record.failure.text);
  CHECK(copy.to_text() == record.to_text());
  expect_error(error_of([] { RankRecord::from_text("ringcomm-shm-0\nx\n"); }), ErrorKind::kMismatch,
               {"different version", "ringcomm-shm-0"});
  expect_error(error_of([] { RankRecord::from_text(""); }), ErrorKind::kMismatch, {});
}

// ---- the plan of the segment

struct Region {
  std::uintptr_t begin, end;
};

template <class T>
Region region_of(const T* at, std::size_t num_bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(at);
  return {begin, begin + num_bytes};
}

void add_link(std::vector<Region>& regions, const LinkGeometry& link) {
  regions.push_back(region_of(link.tail, sizeof(LinkCursors)));
  regions.push_back(region_of(link.slots, link.num_slots * link.slot_bytes));
}

// Addresses are computed but not dereferenced, so the base needs no memory.
std::vector<Region> regions_of(const SegmentLayout& layout, int world_size, std::byte* base) {
  std::vector<Region> regions = {
      {reinterpret_cast<std::uintptr_t>(&layout.abort_record(base)),
       reinterpret_cast<std::uintptr_t>(&layout.has_joined(base, world_size))}};
  const BoardGeometry board = layout.board(base);
  for (int rank = 0; rank < world_size; ++rank) {
    regions.push_back(region_of(&layout.control(base, rank), whole_pages(sizeof(RankControl))));
    for (std::uint64_t phase = 0; phase < 2; ++phase) {
      regions.push_back(region_of(&board.cursor(0, rank, phase), sizeof(Cursor)));
      regions.push_back(region_of(board.region(rank, phase), board.region_bytes));
    }
    add_link(regions, layout.ring_link(base, rank));
    for (int peer = 0; peer < world_size; ++peer)
      if (peer != rank) add_link(regions, layout.send_recv_link(base, rank, peer));
  }
  return regions;
}

TEST_CASE("the parts of a segment lie inside it and apart from each other") {
  constexpr std::uintptr_t kBase = std::uintptr_t{1} << 40;
  auto* base = reinterpret_cast<std::byte*>(kBase);
  const SegmentConfig odd{.board_region_bytes = 5000,
                          .ring_num_slots = 3,
                          .ring_slot_bytes = 192,
                          .send_recv_num_slots = 5,
                          .send_recv_slot_bytes = 4160};
  const SegmentConfig large{.board_region_bytes = std::size_t{1} << 20,
                            .ring_num_slots = 64,
                            .ring_slot_bytes = std::size_t{64} << 20,
                            .send_recv_num_slots = 4,
                            .send_recv_slot_bytes = std::size_t{128} << 10};
  for (const SegmentConfig& config : {SegmentConfig{}, odd, large}) {
    for (int world_size = 2; world_size <= 9; ++world_size) {
      CAPTURE(world_size);
      const SegmentLayout layout(world_size, config);
      std::vector<Region> regions = regions_of(layout, world_size, base);
      std::sort(regions.begin(), regions.end(),
                [](const Region& a, const Region& b) { return a.begin < b.begin; });
      CHECK(regions.front().begin == kBase);
      CHECK(regions.back().end <= kBase + layout.num_bytes());
      for (std::size_t i = 0; i < regions.size(); ++i) {
        CHECK(regions[i].begin % 64 == 0);
        CHECK(regions[i].begin < regions[i].end);
        if (i > 0) CHECK(regions[i - 1].end <= regions[i].begin);
        // Pages of padding, and no more.
        if (i > 0) CHECK(regions[i].begin - regions[i - 1].end < 8192);
      }
    }
  }
}

// Else a sum of many regions would read lines of one set of the L1 cache alone.
TEST_CASE("regions of 32 ranks begin at 32 places of a page, and share no page") {
  constexpr std::uintptr_t kPage = 4096;
  constexpr std::uintptr_t kStreamed = 64;  // what one streaming store writes
  auto* base = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
  for (const std::size_t board_region_bytes :
       {SegmentConfig{}.board_region_bytes, std::size_t{4100}}) {
    for (const int world_size : {2, 32, 64, 300}) {
      CAPTURE(world_size);
      const SegmentConfig config{.board_region_bytes = board_region_bytes};
      const BoardGeometry board = SegmentLayout(world_size, config).board(base);
      CHECK(board.region_bytes >= board_region_bytes - sizeof(Cursor));
      for (std::uint64_t phase = 0; phase < 2; ++phase) {
        std::map<std::uintptr_t, int> places;
        for (int rank = 0; rank < world_size; ++rank) {
          const Region region = region_of(board.region(rank, phase), board.region_bytes);
          CHECK(region.begin % kStreamed == 0);
          ++places[region.begin % kPage];
          if (rank + 1 == world_size && phase == 1) continue;
          const int next = phase == 0 ? rank : rank + 1;
          const auto after = region_of(&board.cursor(0, next, phase + 1), sizeof(Cursor)).begin;
          CHECK((phase == 0 ? region.end <= after : (region.end - 1) / kPage < after / kPage));
        }
        CHECK(static_cast<int>(places.size()) == std::min(world_size, 32));
        for (const auto& [place, num_ranks] : places) CHECK(num_ranks <= (world_size + 31) / 32);
      }
    }
  }
}

TEST_CASE("words that different ranks write stand on lines of their own") {
  CHECK(sizeof(RankControl) % kLineBytes == 0);
  CHECK(offsetof(LinkCursors, head) % kLineBytes == 0);
  CHECK(offsetof(RankControl, doorbell) % kLineBytes == 0);
  CHECK(offsetof(RankControl, has_left) % kLineBytes == 0);
}

TEST_CASE("while a thread returns pages of a group, others are made, and its end waits for it") {
  std::atomic<bool> is_over = false;
  testing::run_ranks(2, [&](Communicator& communicator) {
    if (communicator.rank() == 1)
      return testing::wait_until([&] { return is_over.load(); }, "rank 0");
    const auto make = [&](const char* name) {
      return recorder::Log::make(name, 0, {0, 1}, "shm", *communicator.group_state(), false);
    };
    const auto log = make("idle");
    std::atomic<bool> has_begun = false, goes_on = false, has_ended = false;
    log->on_look([&] {
      has_begun = true;
      for (int i = 0; i < 2000 && !goes_on; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      has_ended = true;
    });
    testing::wait_until([&] { return has_begun.load(); }, "a look, after ten seconds");
    const auto other = make("another");
    testing::expect(!has_ended, "a group made meanwhile");
    goes_on = true;
    log->on_look({});
    testing::expect(has_ended, "an end that has waited");
    is_over = true;
  });
}

}  // namespace
