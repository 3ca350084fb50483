#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/errors.h"

namespace ringcomm {

/// The size of CallHeader (which asserts it): ranks compare it in their records.
inline constexpr std::size_t kCallHeaderBytes = 104;

/// Texts in the store have the length of each field in front of it: a field may hold anything.
inline std::string to_fields(std::initializer_list<std::string> fields) {
  std::string text;
  for (const std::string& field : fields) text += std::to_string(field.size()) + ":" + field;
  return text;
}

/// Reads what to_fields() has made.
class TextFields {
 public:
  explicit TextFields(std::string text) : text_(std::move(text)) {}
  std::string next() {
    const std::size_t num_chars = std::strtoull(text_.c_str(), nullptr, 10);
    text_.erase(0, text_.find(':'));
    const std::string field = text_.empty() ? "" : text_.substr(1, num_chars);
    text_.erase(0, 1 + field.size());
    return field;
  }
  template <class Number = int>
  Number number() {
    return static_cast<Number>(std::strtoll(next().c_str(), nullptr, 10));
  }

 private:
  std::string text_;
};

/// Why a group is no more.
struct AbortReason {
  ErrorKind kind = ErrorKind::kAborted;
  int origin = -1;   ///< the rank that failed
  int culprit = -1;  ///< the rank that it blames, or -1
  std::string text;

  /// That rank `origin` fails with this error.
  static AbortReason of(const std::exception& error, int origin) {
    const auto* known = dynamic_cast<const Error*>(&error);
    return {.kind = known != nullptr ? known->info().kind : ErrorKind::kAborted,
            .origin = origin,
            .culprit = known != nullptr ? known->info().rank : origin,
            .text = error.what()};
  }
  std::string to_text() const {
    return to_fields({std::to_string(static_cast<int>(kind)), std::to_string(origin),
                      std::to_string(culprit), text});
  }
  static AbortReason from_text(const std::string& text) {
    TextFields fields(text);
    return {.kind = static_cast<ErrorKind>(fields.number()),
            .origin = fields.number(),
            .culprit = fields.number(),
            .text = fields.next()};
  }
};

/// The record that each rank publishes in the store before ranks share memory.
struct RankRecord {
  std::string host_id;                 ///< equal for processes that share memory with each other
  std::string host;                    ///< its name, for messages
  std::string bootstrap_address = {};  ///< where its bootstrap listens, and its secrets
  pid_t pid = -1;
  std::string memory_key = {};  ///< random; names memory that it may offer for this group
  std::string options;
  std::string machine_id = {};    ///< equal for processes that can watch each other
  int world_size = 0;             ///< of the group that it makes
  std::string global_ranks = {};  ///< of that group, as text; empty where it has no such numbers
  int attempt = 1;                ///< how often it has begun to make this group over this store
  std::string cores = {};         ///< that it may use; empty where that is not known
  std::int64_t written_ms = 0;    ///< when, by the system's clock, since 1970
  AbortReason failure = {};       ///< why it could not make it; without a text until it fails

  std::string to_text() const;
  /// Throws Error if the text is not a record of this version of ringcomm.
  static RankRecord from_text(const std::string& text);
};

/// Throws Error where the groups of two ranks differ in their ranks or, if `theirs` may join, in
/// their options or, if `is_one_host`, in their host.
void check_same_group(const RankRecord& mine, int rank, const RankRecord& theirs, int peer,
                      bool may_join, bool is_one_host);

/// The hosts of a group's ranks, which may be on them in any order. The same on all ranks: hosts
/// are numbered in the order of their first ranks.
class PeerTable {
 public:
  /// `records` are indexed by rank; at least one.
  explicit PeerTable(const std::vector<RankRecord>& records) {
    std::map<std::string, int> known;
    for (const RankRecord& record : records) {
      const auto [found, is_new] = known.try_emplace(record.host_id, num_hosts());
      if (is_new) {
        names_.push_back(record.host);
        hosts_.emplace_back();
      }
      std::vector<int>& ranks = hosts_[static_cast<std::size_t>(found->second)];
      const int rank = world_size();
      places_.emplace_back(found->second, static_cast<int>(ranks.size()));
      ranks.push_back(rank);
    }
  }

  int world_size() const { return static_cast<int>(places_.size()); }
  int num_hosts() const { return static_cast<int>(hosts_.size()); }
  /// The ranks of a host, ascending.
  const std::vector<int>& ranks_on(int host) const {
    return hosts_[static_cast<std::size_t>(host)];
  }
  int num_ranks_on(int host) const { return static_cast<int>(ranks_on(host).size()); }
  int host_of(int rank) const { return places_[static_cast<std::size_t>(rank)].first; }
  /// The index of `rank` among the ranks of its host.
  int local_rank_of(int rank) const { return places_[static_cast<std::size_t>(rank)].second; }
  int leader_of(int host) const { return ranks_on(host).front(); }

  /// "2 hosts: alpha (ranks 0 2), beta (rank 1)"
  std::string describe() const {
    std::string text = std::to_string(num_hosts()) + (num_hosts() == 1 ? " host: " : " hosts: ");
    for (int host = 0; host < num_hosts(); ++host) {
      if (host > 0) text += ", ";
      text += names_[static_cast<std::size_t>(host)];
      text += num_ranks_on(host) == 1 ? " (rank" : " (ranks";
      for (const int rank : ranks_on(host)) text += " " + std::to_string(rank);
      text += ")";
    }
    return text;
  }

 private:
  std::vector<std::string> names_;           // of hosts
  std::vector<std::vector<int>> hosts_;      // their ranks
  std::vector<std::pair<int, int>> places_;  // by rank: host, and rank there
};

/// "0-3, 8" of ascending numbers.
std::string ranges_of(const std::vector<std::uint64_t>& numbers);

/// The boot and the network namespace of this process: abstract Unix sockets reach no further.
/// RINGCOMM_HOST_ID replaces it.
std::string host_id();
/// The same whatever RINGCOMM_HOST_ID is, and the user: a bootstrap answers its own user only.
std::string machine_id();
/// Of this machine; letters that are not of ASCII are ?.
std::string host_name();

}  // namespace ringcomm
