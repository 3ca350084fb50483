#pragma once

// Processes that tests fork. A child of a program with threads may make few calls only.

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iterator>
#include <string>

namespace ringcomm::testing {

/// Descriptors, threads or other things of this process.
inline std::size_t num_entries(const char* directory) {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator(directory), {}));
}

/// How a child ends: its status, or minus the number of its signal.
inline int end_of(pid_t pid) {
  int status = 0;
  if (pid <= 0 || ::waitpid(pid, &status, 0) != pid) return -1000;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/// Runs `body` in a forked process, which a signal ends after a minute; its end.
inline int status_of_child(const std::function<int()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(60);
    int code = 99;
    try {
      code = body();
    } catch (...) {
    }
    ::_exit(code);
  }
  return end_of(pid);
}

/// In a child: becomes this program, which runs the case that the option names, "child: ...".
[[noreturn]] inline void become_case(const char* option) {
  ::execl("/proc/self/exe", "ringcomm_tests", "--no-skip", option, nullptr);
  ::_exit(127);
}

/// Runs such a case in a process of its own, with a variable of the environment; its end.
inline int status_of_case(const char* option, const char* variable = "",
                          const std::string& value = {}) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setenv(variable, value.c_str(), 1);
    become_case(option);
  }
  return end_of(pid);
}

/// From now on the kernel refuses this process a call, where that argument is in a range, as one
/// that it does not know. False where that cannot be.
inline bool refuse_calls(int number, std::size_t argument, unsigned least, unsigned most) {
  const auto place = static_cast<unsigned>(offsetof(seccomp_data, args) + argument * 8);
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(number), 0, 4),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, place),
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, least, 0, 2),
      BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, most, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{.len = std::size(code), .filter = code};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

}  // namespace ringcomm::testing
