#pragma once

// Starts the two processes of a question, and prints their answer.

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <new>

#include "gpu/probe/gpu.h"
#include "gpu/probe/pair.h"
#include "host/process.h"

namespace ringcomm::probe {

inline constexpr int kStartLimits = 4;  // of the answer's limit: the first context may take seconds

struct Question {
  const char* name;
  void (*ask)(Side&, Gpu&);
};

inline pid_t start(Role role, const Question& question, Page& page) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Side side(role, page);
  try {
    side.step("start");
    Gpu gpu;
    page.has_mps = gpu.attribute(cuda::kMpsEnabled) != 0;
    side.meet();
    question.ask(side, gpu);
  } catch (const std::exception& error) {
    side.fail(error.what());
  }
  _exit(0);
}

/// Waits until both have ended, or ends them at a limit.
inline void wait_for(std::array<pid_t, 2> pids, Page& page, int limit_s) {
  const Clock::time_point began = Clock::now();
  Clock::time_point deadline = began + std::chrono::seconds(limit_s * kStartLimits);
  bool is_ready = false;
  while (pids[0] > 0 || pids[1] > 0) {
    if (!is_ready && page.num_meetings > 0) {
      is_ready = true;
      deadline = Clock::now() + std::chrono::seconds(limit_s);
    }
    for (const Role role : {kExporter, kImporter}) {
      pid_t& pid = pids[role];
      int status = 0;
      if (pid <= 0 || waitpid(pid, &status, WNOHANG) == 0) continue;
      pid = 0;
      if (status == 0) continue;
      Side(role, page)
          .answer("none: ended by signal " + std::to_string(WTERMSIG(status)) + ", " +
                  Side::where(role, page));
      page.has_failed = true;
    }
    if (Clock::now() > deadline) {
      Side(kImporter, page)
          .answer("none in time, " + Side::where(kExporter, page) + ", " +
                  Side::where(kImporter, page));
      for (const pid_t pid : pids)
        if (pid > 0) kill(pid, SIGKILL);
    }
    usleep(1000);
  }
}

/// Whether there is an answer.
inline bool ask(const Question& question, int limit_s) {
  void* shared =
      mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) throw std::runtime_error("no memory for two processes");
  auto& page = *new (shared) Page;
  if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, page.sockets.data()) != 0)
    host::throw_errno("socketpair");
  const Clock::time_point began = Clock::now();
  const std::array pids = {start(kExporter, question, page), start(kImporter, question, page)};
  wait_for(pids, page, limit_s);
  std::string text = page.is_answered ? page.answer.data() : "none";
  for (char& letter : text)
    if (letter == '"' || letter == '\\' || letter == '\n') letter = '\'';
  std::printf(R"({"op":"probe","question":"%s","mps":%s,"answer":"%s","s":%.2f})"
              "\n",
              question.name, page.has_mps ? "true" : "false", text.c_str(), us_since(began) / 1e6);
  std::fflush(stdout);
  for (const int end : page.sockets) ::close(end);
  munmap(shared, sizeof(Page));
  return text.rfind("none", 0) != 0;
}

}  // namespace ringcomm::probe
