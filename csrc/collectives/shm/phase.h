#pragma once

#include <algorithm>
#include <cstddef>

#include "collectives/shm/engine.h"
#include "core/chunk_layout.h"

namespace ringcomm {

/// The first board phase of a piece; that of the first piece carries the call's header.
struct Phase {
  Engine& engine;
  const CallHeader& header;
  bool is_first;

  std::byte* open() const { return is_first ? engine.open_first(header) : engine.open(); }
  const std::byte* wait(int peer) const {
    return is_first ? engine.wait_first(peer, header) : engine.wait(peer);
  }
};

/// Runs `body(elems, phase)` over `num_elems` elements, at most `max_elems` at a time, and at least
/// once, because headers are exchanged even without data. Only once if a peer's buffers are shared;
/// see Engine::has_notes().
template <class Body>
void for_each_piece(Engine& engine, const CallHeader& header, std::size_t num_elems,
                    std::size_t max_elems, const Body& body) {
  const std::size_t num_pieces = std::max<std::size_t>(1, num_slices(num_elems, max_elems));
  for (std::size_t piece_idx = 0; piece_idx < num_pieces && !engine.has_notes(); ++piece_idx)
    body(slice_of({0, num_elems}, piece_idx, max_elems), Phase{engine, header, piece_idx == 0});
}

}  // namespace ringcomm
