#pragma once

// Two processes that answer a question together, within a limit.

#include <sched.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "cuda/driver/driver_api.h"

namespace ringcomm::probe {

using Clock = std::chrono::steady_clock;

inline double us_since(Clock::time_point began) {
  return std::chrono::duration<double, std::micro>(Clock::now() - began).count();
}

enum Role { kExporter, kImporter };
inline constexpr const char* kRoleNames[] = {"exporter", "importer"};

/// Host memory that the two processes and the program share. Between two meetings one process
/// writes `handle` and the numbers, and between the next two the other one reads them.
struct Page {
  std::atomic<int> num_arrived = 0;
  std::atomic<int> num_meetings = 0;
  std::atomic<bool> is_answered = false;
  std::atomic<bool> has_failed = false;
  std::atomic<bool> has_mps = false;
  cuda::IpcMemHandle handle = {};
  std::array<std::uint64_t, 8> numbers = {};
  /// By role: a bit for each multiprocessor; when a kernel began and ended, and its longest pause.
  std::array<std::array<std::uint64_t, 8>, 2> multiprocessors = {};
  std::array<std::array<std::uint64_t, 3>, 2> ran = {};
  std::array<int, 2> sockets = {};                 // the exporter's end, and the importer's
  std::array<std::array<char, 40>, 2> steps = {};  // by role: the call it is in
  std::array<char, 300> answer = {};
};

/// One of the two processes.
class Side {
 public:
  Side(Role role, Page& page) : page(page), role_(role) {}

  Page& page;
  bool exports() const { return role_ == kExporter; }
  Role role() const { return role_; }
  int socket() const { return page.sockets[static_cast<std::size_t>(role_)]; }
  /// What this process does now: the answer if it never returns.
  void step(const char* text) {
    std::snprintf(page.steps[static_cast<std::size_t>(role_)].data(), 40, "%s", text);
  }
  /// Waits for the other process; the program ends both at the limit. Throws if the other failed.
  void meet() {
    const int before = page.num_meetings;
    if (page.num_arrived.fetch_add(1) == 1) {
      page.num_arrived = 0;
      page.num_meetings = before + 1;
      return;
    }
    while (page.num_meetings == before) {
      if (page.has_failed) throw std::runtime_error("the other process has failed");
      sched_yield();
    }
  }
  /// The first answer counts.
  void answer(const std::string& text) {
    if (page.is_answered) return;
    std::snprintf(page.answer.data(), page.answer.size(), "%s", text.c_str());
    page.is_answered = true;
  }
  /// An error of the driver is an answer too, after the first meeting.
  void fail(const std::string& why) {
    answer((page.num_meetings == 0 ? "none: " : "") + where() + ": " + why);
    page.has_failed = true;
  }
  std::string where() const { return where(role_, page); }
  static std::string where(Role role, const Page& page) {
    return std::string("the ") + kRoleNames[role] +
           " at: " + page.steps[static_cast<std::size_t>(role)].data();
  }

 private:
  Role role_;
};

}  // namespace ringcomm::probe
