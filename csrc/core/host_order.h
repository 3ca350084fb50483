#pragma once

namespace ringcomm {

/// The order in which a rank moves the shards of a gather, scatter or all_to_all over several
/// hosts: in step d to the rank d places on, and inside its host at once.
///
/// `inside` returns when all ranks of the host have called it. `move` starts the messages of a
/// step, `finish` waits for those that were started, and `must_finish` says whether so much was
/// sent that the next step has to wait. Where that may differ between ranks, as in an all_to_all,
/// `inside` is first: afterwards messages wait for messages only, and the rank in the lowest step
/// for ranks that have started it. Were it last, ranks of two hosts would wait for each other in a
/// circle.
template <class Inside, class MustFinish, class Move, class Finish>
void move_over_hosts(int rank, int world_size, bool is_inside_first, const Inside& inside,
                     const MustFinish& must_finish, const Move& move, const Finish& finish) {
  const bool is_inside_last = !is_inside_first;
  if (!is_inside_last) inside();
  for (int distance = 1; distance < world_size; ++distance) {
    if (must_finish()) finish();
    move((rank + distance) % world_size, (rank + world_size - distance) % world_size);
  }
  if (is_inside_last) inside();
  finish();
}

}  // namespace ringcomm
