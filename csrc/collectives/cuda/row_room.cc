#include "collectives/cuda/row_room.h"

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "collectives/cuda/staging_plan.h"

namespace ringcomm::cuda {

int RowRoom::num_clusters(unsigned cluster_blocks, int max_active) {
  if (const auto found = known_.find(cluster_blocks); found != known_.end()) return found->second;
  return known_[cluster_blocks] = find_room(static_cast<int>(cluster_blocks), max_active);
}

// Where another group takes seats between the look at them and this, there are no clusters.
int RowRoom::find_room(int cluster_blocks, int max_active) {
  struct Facts {
    std::int32_t max_active;
    std::int32_t free_seats;
  };
  const RankPlace& place = group_.places()[static_cast<std::size_t>(exchange_.rank())];
  std::unique_ptr<DeviceRoom> room;
  Facts least = {max_active, 0};
  // Ranks on other GPUs wait in the exchange, so a room that cannot be used is one without seats.
  std::ignore = attempt([&] {
    room = std::make_unique<DeviceRoom>(place.device, place.num_seats);
    least.free_seats = room->num_free();
  });
  for (const Facts& theirs : exchange_.all_gather(Facts(least))) {
    least.max_active = std::min(least.max_active, theirs.max_active);
    least.free_seats = std::min(least.free_seats, theirs.free_seats);
  }
  const RowPlan plan = plan_rows(group_.facts(), group_.staging().layout, cluster_blocks,
                                 least.max_active, least.free_seats, num_taken_);
  if (plan.num_clusters == 0 || plan.num_more_seats == 0) return plan.num_clusters;
  bool is_seated = !takes_seats(group_.facts(), exchange_.rank());
  if (!is_seated) std::ignore = attempt([&] { is_seated = room->take(plan.num_more_seats); });
  const std::vector<std::uint8_t> are_seated = exchange_.all_gather(std::uint8_t{is_seated});
  if (std::find(are_seated.begin(), are_seated.end(), 0) != are_seated.end()) return 0;
  num_taken_ += plan.num_more_seats;
  rooms_.push_back(std::move(room));
  return plan.num_clusters;
}

}  // namespace ringcomm::cuda
