#include "host/workers.h"

#include "host/cores.h"
#include "host/process.h"

namespace ringcomm::host {
namespace {

// A call below it is over before other cores have been woken.
constexpr std::size_t kMinCallBytes = std::size_t{256} << 10;

ThreadTeam team_of_program = {[] { return 1; }, nullptr};
bool has_own_threads = true;
thread_local bool is_alone = false;

int count_allowed() { return static_cast<int>(cores_of_thread().count()); }

}  // namespace

void set_thread_team(const ThreadTeam& team, bool is_inherited) {
  team_of_program = team;
  has_own_threads = !is_inherited;
}

const ThreadTeam& thread_team() { return team_of_program; }

bool may_use_team() { return has_own_threads && process_generation() == 0; }

void leave_thread_team() { is_alone = true; }

Workers::Workers(int max_threads) : num_allowed_(count_allowed()), max_threads_(max_threads) {}

void Workers::begin(std::size_t num_bytes) {
  may_split_ = false;
  num_threads_ = 1;
  taken_ticks_ = moved_bytes_ = 0;
  if (num_bytes < kMinCallBytes || max_threads_ == 1 || is_alone) return;
  const int team_size = team_of_program.size();
  if (team_size < 2) return;
  // A program may pin its threads to one core each, and then makes groups; or pins itself later.
  may_split_ =
      max_threads_ > 0 || (may_use_team() && team_size <= CoreShare::fewest_cores_per_rank() &&
                           count_allowed() >= std::min(team_size, num_allowed_));
  if (!may_split_) return;
  if (max_threads_ > 0)
    num_threads_ = static_cast<std::size_t>(std::min(max_threads_, team_size));
  else if (num_alone_left_ == 0)
    num_threads_ = static_cast<std::size_t>(team_size);
  else
    --num_alone_left_;
}

void Workers::end() {
  if (moved_bytes_ == 0 || max_threads_ > 0) return;
  const double rate = static_cast<double>(taken_ticks_) / static_cast<double>(moved_bytes_);
  double& alone = alone_ticks_per_byte_;
  if (num_threads_ == 1) {
    alone = alone == 0 ? rate : (alone + rate) / 2;
  } else if (rate < alone) {
    num_alone_next_ = 2 * kFirstAlone;
  } else {
    num_alone_left_ = num_alone_next_;
    num_alone_next_ = std::min(2 * num_alone_next_, kMostAlone);
  }
}

}  // namespace ringcomm::host
