#include "collectives/engine.h"

#include <cstring>

namespace ringcomm {
namespace {

// From this size of the whole result on, it is not in a cache when the caller looks at it, and
// stores past the caches save reading what they overwrite (docs/experiments.md, "all_gather").
// Below, they cost what they save.
constexpr std::size_t kStreamedResultBytes = std::size_t{16} << 20;

}  // namespace

std::byte* Engine::open() {
  std::byte* region = nullptr;
  check(board_.open(region));
  return region + kHeaderBytes;
}

const std::byte* Engine::wait(int peer) {
  const std::byte* region = nullptr;
  check(board_.wait(peer, region));
  return region + kHeaderBytes;
}

std::byte* Engine::open_first(const CallHeader& header) {
  std::byte* payload = open();
  std::memcpy(payload - kHeaderBytes, &header, sizeof(header));
  return payload;
}

const std::byte* Engine::wait_header(int peer, CallHeader& theirs) {
  const std::byte* payload = wait(peer);
  std::memcpy(&theirs, payload - kHeaderBytes, sizeof(theirs));
  return payload;
}

const std::byte* Engine::wait_first(int peer, const CallHeader& header) {
  CallHeader theirs;
  const std::byte* payload = wait_header(peer, theirs);
  if (!(theirs == header)) throw Mismatched{peer, theirs};
  return payload;
}

void Engine::exchange_headers(const CallHeader& header) {
  open_first(header);
  publish();
  for (int peer = 0; peer < world_size(); ++peer)
    if (peer != rank()) wait_first(peer, header);
}

void Engine::stage(void* to, const void* from, std::size_t num_bytes) {
  if (num_bytes > 0) host::copy_bytes(to, from, num_bytes, store_kinds_.kind());
  copied_bytes_ += num_bytes;
}

void Engine::copy_result(void* to, const void* from, std::size_t num_bytes,
                         std::size_t result_bytes) {
  if (num_bytes == 0 || to == from) return;
  const bool is_streamed = result_bytes >= kStreamedResultBytes;
  host::copy_bytes(to, from, num_bytes,
                   is_streamed ? host::StoreKind::kStreaming : host::StoreKind::kCached);
  copied_bytes_ += num_bytes;
}

}  // namespace ringcomm
