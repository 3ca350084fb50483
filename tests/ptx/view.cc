#include "ptx/view.h"

#include <algorithm>
#include <array>

namespace ringcomm::ptx {
namespace {

template <class Value>
using Entries = std::vector<std::pair<u64, Value>>;

// The first entry that is not before the key.
auto from(auto& entries, u64 key) {
  return std::ranges::lower_bound(entries, key, {}, [](const auto& entry) { return entry.first; });
}

template <class Value>
Value value_at(const Entries<Value>& entries, u64 key) {
  const auto found = from(entries, key);
  return found != entries.end() && found->first == key ? found->second : Value{0};
}

template <class Value>
void raise(Entries<Value>& entries, u64 key, Value value) {
  const auto found = from(entries, key);
  if (found != entries.end() && found->first == key)
    found->second = std::max(found->second, value);
  else
    entries.insert(found, {key, value});
}

template <class Value>
void sort_by_key(Entries<Value>& entries) {
  std::sort(entries.begin(), entries.end());
  // Of entries with one key the last has the largest value.
  std::size_t num = 0;
  for (std::size_t i = 0; i < entries.size(); ++i)
    if (i + 1 == entries.size() || entries[i].first != entries[i + 1].first)
      entries[num++] = entries[i];
  entries.resize(num);
}

ViewRef changed(const ViewRef& view, const auto& change) {
  auto result = view == nullptr ? std::make_shared<View>() : std::make_shared<View>(*view);
  change(*result);
  return result;
}

}  // namespace

bool View::knows(const Stamp& stamp) const {
  if (stamp.slot == Stamp::kEveryone) return true;
  if (stamp.slot < barriers.size() && barriers[stamp.slot] > stamp.barriers) return true;
  return !releases.empty() &&
         value_at(releases, thread_key(stamp.slot, stamp.thread)) > stamp.releases;
}

u64 View::seen_at(u64 cell) const { return seen.empty() ? 0 : value_at(seen, cell); }

ViewRef join(const ViewRef& a, const ViewRef& b) {
  if (a == b || b == nullptr) return a;
  if (a == nullptr) return b;
  return join_all(std::array{a, b});
}

ViewRef join_all(std::span<const ViewRef> views) {
  ViewRef only;
  View result;
  bool has_several = false;
  for (const ViewRef& view : views) {
    if (view == nullptr || view == only) continue;
    has_several = has_several || only != nullptr;
    only = view;
    if (result.barriers.size() < view->barriers.size())
      result.barriers.resize(view->barriers.size());
    for (std::size_t slot = 0; slot < view->barriers.size(); ++slot)
      result.barriers[slot] = std::max(result.barriers[slot], view->barriers[slot]);
    result.releases.insert(result.releases.end(), view->releases.begin(), view->releases.end());
    result.seen.insert(result.seen.end(), view->seen.begin(), view->seen.end());
  }
  if (!has_several) return only;
  sort_by_key(result.releases);
  sort_by_key(result.seen);
  return std::make_shared<View>(std::move(result));
}

ViewRef with_release(const ViewRef& view, const Stamp& stamp) {
  return changed(view, [&](View& result) {
    raise(result.releases, View::thread_key(stamp.slot, stamp.thread), stamp.releases + 1);
  });
}

ViewRef with_barrier(const ViewRef& view, u32 slot, u32 barriers) {
  return changed(view, [&](View& result) {
    if (result.barriers.size() <= slot) result.barriers.resize(slot + 1);
    result.barriers[slot] = std::max(result.barriers[slot], barriers);
    // A barrier of the block covers what its threads had released.
    std::erase_if(result.releases, [&](const auto& entry) { return entry.first >> 32 == slot; });
  });
}

ViewRef with_seen(const ViewRef& view, u64 cell, u64 time) {
  return changed(view, [&](View& result) { raise(result.seen, cell, time); });
}

}  // namespace ringcomm::ptx
