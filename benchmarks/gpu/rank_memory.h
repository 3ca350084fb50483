#pragma once

// What one rank has on the GPU, and maps of the other ranks.

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>

#include "cuda/collectives/launches.h"
#include "cuda/driver/device_memory.h"
#include "gpu/ranks.h"
#include "host/unix_socket.h"

namespace ringcomm::benchmarks {

inline constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat32};

/// Inputs have small integers, whose sums are exact in each of the types. They depend on the rank,
/// and on the phase of the element's place.
inline constexpr std::size_t kNumPhases = 31;
inline constexpr std::size_t kRun = 997;
inline std::size_t phase_of(std::size_t idx) { return (idx * 7 + idx / kRun) % kNumPhases; }
/// The phases repeat after so many elements.
inline constexpr std::size_t kPeriod = kRun * kNumPhases;
inline int value_at(int rank, std::size_t phase) {
  return static_cast<int>((phase + static_cast<std::size_t>(rank) * 13) % kNumPhases) - 15;
}
inline std::uint32_t bits_of(DType dtype, int value) {
  const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
  return dtype == DType::kBFloat16 ? bits >> 16 : bits;
}

/// A rank's stream and its memory, in one piece that all ranks map: the staging of each layout, an
/// input of each type, an output. All functions throw Error.
class RankMemory {
 public:
  static constexpr std::size_t kPieceBytes = std::size_t{4} << 20;  // of what the host looks at

  /// Collective.
  RankMemory(int rank, Page& page, const std::vector<cuda::StagingLayout>& layouts,
             std::size_t buffer_bytes)
      : rank_(static_cast<std::size_t>(rank)), buffer_bytes_(in_pages(buffer_bytes)) {
    cuda::check(cuda::driver().stream_create(&stream_, cuda::kStreamNonBlocking), "make a stream");
    for (const cuda::StagingLayout& layout : layouts) {
      layout_offsets_.push_back(staging_bytes_);
      staging_bytes_ += in_pages(layout.num_bytes());
    }
    const std::size_t num_bytes = staging_bytes_ + (std::size(kTypes) + 1) * buffer_bytes_;
    own_ = std::make_unique<cuda::DeviceMemory>(0, num_bytes);
    control_ = std::make_unique<cuda::MappedHostMemory>(0, sizeof(cuda::Control));
    abort_word = &(new (control_->host()) cuda::Control)->abort;
    piece_ = std::make_unique<cuda::MappedHostMemory>(0, kPieceBytes);
    fill(own_->data(), 0, num_bytes);
    exchange(page, num_bytes);
    bases_ = std::make_unique<cuda::DeviceMemory>(0, sizeof(cuda::Staging::of));
    std::memcpy(piece(), parts_.data(), parts_.size() * sizeof(std::byte*));
    upload(bases_->data(), parts_.size() * sizeof(std::byte*));
    for (const DType dtype : kTypes) fill_input(dtype);
    page.barrier();
  }
  /// Collective: nobody frees memory that another rank has open.
  void close(Page& page) {
    page.barrier();
    theirs_.clear();
    abort_word = nullptr;
    page.barrier();
  }

  cuda::StreamHandle stream() const { return stream_; }
  std::byte* input(DType dtype) const {
    return buffer(static_cast<std::size_t>(std::find(kTypes, std::end(kTypes), dtype) - kTypes));
  }
  std::byte* output() const { return buffer(std::size(kTypes)); }
  std::size_t buffer_bytes() const { return buffer_bytes_; }
  /// What upload() and download() move: kPieceBytes.
  std::byte* piece() const { return static_cast<std::byte*>(piece_->host()); }

  void fill_frame(std::size_t layout, cuda::GroupFrame& frame) const {
    frame.control = static_cast<cuda::Control*>(control_->device());
    frame.bases = reinterpret_cast<std::byte* const*>(bases_->data());
    for (std::size_t peer = 0; peer < parts_.size(); ++peer)
      frame.staging.of[peer] = parts_[peer] + layout_offsets_[layout];
  }
  /// Where peers have mapped a buffer.
  cuda::Place place_of(const std::byte* buffer) const {
    return cuda::place_in(0, static_cast<std::uint64_t>(buffer - parts_[rank_]));
  }

  /// On the stream.
  void copy(std::byte* to, const std::byte* from, std::size_t num_bytes) const {
    cuda::check(cuda::driver().memcpy_async(address(to), address(from), num_bytes, stream_),
                "copy");
  }
  void fill(std::byte* to, unsigned char value, std::size_t num_bytes) const {
    cuda::check(cuda::driver().memset_d8_async(address(to), value, num_bytes, stream_), "fill");
    finish();
  }
  void upload(std::byte* to, std::size_t num_bytes) const {
    copy(to, static_cast<std::byte*>(piece_->device()), num_bytes);
    finish();
  }
  void download(const std::byte* from, std::size_t num_bytes) const {
    copy(static_cast<std::byte*>(piece_->device()), from, num_bytes);
    finish();
  }
  /// Waits for the stream, which ends: a kernel's waits have a limit. Throws where one gave up.
  void finish() const {
    cuda::check(cuda::driver().stream_synchronize(stream_), "wait for the GPU");
    const auto* control = static_cast<const volatile cuda::Control*>(control_->host());
    if (control->stop != 0)
      throw std::runtime_error("a kernel gave up: reason " + std::to_string(control->stop) +
                               ", rank " + std::to_string(control->peer));
  }

 private:
  // Maps the peers' memory.
  void exchange(Page& page, std::size_t num_bytes) {
    const auto num_ranks = static_cast<std::size_t>(page.num_ranks);
    theirs_.resize(num_ranks);
    const host::UniqueFd fd = own_->export_fd();
    for (std::size_t peer = 0; peer < num_ranks; ++peer)
      if (peer != rank_)
        host::send_message(page.mailboxes[peer][1], std::to_string(rank_), fd.get());
    for (std::size_t i = 1; i < num_ranks; ++i) {
      const int mailbox = page.mailboxes[rank_][0];
      host::is_readable(mailbox, Page::kBarrierTimeout);
      const auto message = host::recv_message(mailbox);
      if (!message) throw std::runtime_error("a rank did not hand over its memory in 60 s");
      theirs_[std::stoul(message->text)] =
          std::make_unique<cuda::DeviceMemory>(0, num_bytes, message->fd);
    }
    for (std::size_t peer = 0; peer < num_ranks; ++peer)
      parts_.push_back(peer == rank_ ? own_->data() : theirs_[peer]->data());
  }

  static std::size_t in_pages(std::size_t num_bytes) { return (num_bytes + 4095) / 4096 * 4096; }
  static cuda::DevicePtr address(const std::byte* data) {
    return reinterpret_cast<cuda::DevicePtr>(data);
  }
  std::byte* buffer(std::size_t idx) const {
    return parts_[rank_] + staging_bytes_ + idx * buffer_bytes_;
  }
  void fill_input(DType dtype) const {
    const std::size_t elem_bytes = element_bytes(dtype);
    for (std::size_t done = 0; done < buffer_bytes_; done += kPieceBytes) {
      const std::size_t num_bytes = std::min(kPieceBytes, buffer_bytes_ - done);
      for (std::size_t at = 0; at < num_bytes; at += elem_bytes) {
        const std::size_t phase = phase_of((done + at) / elem_bytes);
        const std::uint32_t bits = bits_of(dtype, value_at(static_cast<int>(rank_), phase));
        std::memcpy(piece() + at, &bits, elem_bytes);
      }
      upload(input(dtype) + done, num_bytes);
    }
  }

  std::size_t rank_;
  std::size_t buffer_bytes_;
  std::size_t staging_bytes_ = 0;
  std::vector<std::size_t> layout_offsets_;
  cuda::StreamHandle stream_ = nullptr;
  std::unique_ptr<cuda::DeviceMemory> own_;
  std::vector<std::unique_ptr<cuda::DeviceMemory>> theirs_;  // by rank; null for this one
  std::vector<std::byte*> parts_;                            // each rank's, as mapped here
  std::unique_ptr<cuda::DeviceMemory> bases_;                // the same, for kernels
  std::unique_ptr<cuda::MappedHostMemory> control_;
  std::unique_ptr<cuda::MappedHostMemory> piece_;
};

}  // namespace ringcomm::benchmarks
