#include "collectives/shm/algorithm_choice.h"

namespace ringcomm {
namespace {

constexpr std::size_t measured_max_bytes(int world_size) {
  if (world_size <= 2) return std::size_t{256} << 10;
  if (world_size <= 4) return std::size_t{48} << 10;
  return std::size_t{32} << 10;
}

}  // namespace

Algorithm choose_all_reduce(std::size_t num_bytes, int world_size, std::size_t one_shot_max_bytes) {
  const std::size_t limit =
      one_shot_max_bytes != 0 ? one_shot_max_bytes : measured_max_bytes(world_size);
  return num_bytes <= limit ? Algorithm::kOneShot : Algorithm::kTwoShot;
}

std::size_t min_direct_bytes(OpKind op, int world_size) {
  if (op == OpKind::kBroadcast) return std::size_t{128} << 10;
  return std::size_t{world_size <= 2 ? 8U : 64U} << 10;
}

}  // namespace ringcomm
