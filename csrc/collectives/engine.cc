#include "collectives/engine.h"

#include <cstring>

namespace ringcomm {

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

const std::byte* Engine::wait_first(int peer, const CallHeader& header) {
  const std::byte* payload = wait(peer);
  CallHeader theirs;
  std::memcpy(&theirs, payload - kHeaderBytes, sizeof(theirs));
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
}

}  // namespace ringcomm
