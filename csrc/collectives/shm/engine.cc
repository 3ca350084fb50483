#include "collectives/shm/engine.h"

#include <cstring>

namespace ringcomm {
namespace {

// From this size, the result is not in a cache when the caller reads it, and non-temporal stores
// save the read of the overwritten lines (docs/experiments.md, "all_gather"). Below, they cost as
// much as they save.
constexpr std::size_t kStreamedResultBytes = std::size_t{16} << 20;

CallHeader header_at(const std::byte* place) {
  CallHeader header;
  std::memcpy(&header, place, header.told_bytes());
  if (header.has_update) std::memcpy(&header, place, header.told_bytes());
  return header;
}

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
  return are_headers_known_ ? open() : open_with_header(header, {});
}

const std::byte* Engine::wait_header(int peer, CallHeader& theirs) {
  const std::byte* payload = wait(peer);
  theirs = header_at(payload - kHeaderBytes);
  return payload;
}

const std::byte* Engine::wait_first(int peer, const CallHeader& header) {
  const std::byte* payload = wait(peer);
  if (!are_headers_known_ && check_header(peer, payload, header).is_given()) has_notes_ = true;
  return payload;
}

void Engine::publish_note(const CallHeader& header, const BufferNote& note) {
  open_with_header(header, note);
  publish();
}

void Engine::read_notes(const CallHeader& header, const BufferNote& mine, BufferNote* notes) {
  for (int peer = 0; peer < world_size(); ++peer)
    notes[peer] = peer == rank() ? mine : check_header(peer, wait(peer), header);
  are_headers_known_ = true;
  has_notes_ = false;
}

std::byte* Engine::open_with_header(const CallHeader& header, const BufferNote& note) {
  std::byte* payload = open();
  std::memcpy(payload - kHeaderBytes, &header, header.told_bytes());
  std::memcpy(payload - kHeaderBytes + kNoteOffsetBytes, &note, sizeof(note));
  return payload;
}

BufferNote Engine::check_header(int peer, const std::byte* payload,
                                const CallHeader& header) const {
  const CallHeader theirs = header_at(payload - kHeaderBytes);
  if (!(theirs == header)) throw Mismatched{peer, theirs};
  BufferNote note;
  std::memcpy(&note, payload - kHeaderBytes + kNoteOffsetBytes, sizeof(note));
  return note;
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
