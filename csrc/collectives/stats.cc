#include "collectives/stats.h"

#include <mutex>
#include <set>

#include "host/process.h"

namespace ringcomm {
namespace {

struct Groups {
  std::mutex mutex;
  std::set<const Stats*> living;
  Stats::Table ended = {};
};
constinit PerProcess<Groups> groups;

}  // namespace

Stats::Stats() {
  Groups& all = groups.get();
  const std::lock_guard lock(all.mutex);
  all.living.insert(this);
}

Stats::~Stats() {
  Groups& all = groups.get();
  const std::lock_guard lock(all.mutex);
  if (all.living.erase(this) > 0) add_to(all.ended);  // not one that a child has inherited
}

void Stats::add_to(Table& table) const {
  for (int i = 0; i < kNumOpKinds * kNumAlgorithms; ++i) {
    const auto op = static_cast<OpKind>(i / kNumAlgorithms);
    const auto algorithm = static_cast<Algorithm>(i % kNumAlgorithms);
    const Counts more = counts(op, algorithm);
    Counts& sum = table[static_cast<std::size_t>(op)][static_cast<std::size_t>(algorithm)];
    sum.num_calls += more.num_calls;
    sum.sent_bytes += more.sent_bytes;
    sum.copied_bytes += more.copied_bytes;
  }
}

Stats::Table Stats::process_wide() {
  Groups& all = groups.get();
  const std::lock_guard lock(all.mutex);
  Table sum = all.ended;
  for (const Stats* stats : all.living) stats->add_to(sum);
  return sum;
}

}  // namespace ringcomm
