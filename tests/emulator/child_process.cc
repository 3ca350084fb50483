#include "emulator/child_process.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <thread>

extern char** environ;

namespace ringcomm::emulator::testing {
namespace {

constexpr int kChildSocket = 3;
constexpr const char* kChildOption = "--child";

std::map<std::string, void (*)()>& functions() {
  static std::map<std::string, void (*)()> all;
  return all;
}

bool send_message(int socket, const std::vector<char>& message, int fd) {
  char control[CMSG_SPACE(sizeof(int))] = {};
  char none = 0;
  iovec data = {.iov_base = message.empty() ? &none : const_cast<char*>(message.data()),
                .iov_len = message.empty() ? 1 : message.size()};
  msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (fd >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(part), &fd, sizeof(int));
  }
  return sendmsg(socket, &header, MSG_NOSIGNAL) >= 0;
}

std::vector<char> receive_message(int socket, int* fd) {
  pollfd wait = {.fd = socket, .events = POLLIN, .revents = 0};
  if (poll(&wait, 1, static_cast<int>(std::chrono::milliseconds(kBound).count())) <= 0) return {};
  char control[CMSG_SPACE(sizeof(int))] = {};
  std::vector<char> message(4096);
  iovec data = {.iov_base = message.data(), .iov_len = message.size()};
  msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  const ssize_t num_bytes = recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  message.resize(num_bytes > 0 ? static_cast<std::size_t>(num_bytes) : 0);
  const cmsghdr* part = CMSG_FIRSTHDR(&header);
  if (fd != nullptr && part != nullptr) std::memcpy(fd, CMSG_DATA(part), sizeof(int));
  return message;
}

std::vector<std::string> environment_with(const Environment& changes) {
  std::vector<std::string> made;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (changes.count(text.substr(0, text.find('='))) == 0) made.push_back(text);
  }
  for (const auto& [name, value] : changes) made.push_back(name + "=" + value);
  return made;
}

}  // namespace

ChildProcess::ChildProcess(const std::string& function, const Environment& environment) {
  int sockets[2] = {};
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0)
    throw std::runtime_error("socketpair failed");
  const std::vector<std::string> texts = environment_with(environment);
  std::vector<char*> pointers;
  for (const std::string& text : texts) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  char program[] = "/proc/self/exe";
  char* arguments[] = {program, const_cast<char*>(kChildOption),
                       const_cast<char*>(function.c_str()), nullptr};
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(sockets[1], kChildSocket);
    execve(program, arguments, pointers.data());
    _exit(127);
  }
  close(sockets[1]);
  socket_ = sockets[0];
  if (pid_ < 0) throw std::runtime_error("fork failed");
}

ChildProcess::~ChildProcess() {
  kill();
  close(socket_);
}

void ChildProcess::send(const std::vector<char>& message, int fd) {
  send_message(socket_, message, fd);
}

std::vector<char> ChildProcess::receive(int* fd) { return receive_message(socket_, fd); }

int ChildProcess::wait() {
  // Never with pid_ = -1, which stands for every process there is.
  must(pid_ > 0, "a child that nobody has waited for");
  const auto end = std::chrono::steady_clock::now() + kBound;
  int status = 0;
  pid_t ended = 0;
  while ((ended = waitpid(pid_, &status, WNOHANG)) == 0) {
    if (std::chrono::steady_clock::now() > end) ::kill(pid_, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  must(ended == pid_, "the status of a child");
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

void ChildProcess::kill() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  wait();
}

void send_to_parent(const std::vector<char>& message, int fd) {
  must(send_message(kChildSocket, message, fd), "a parent that listens");
}

std::vector<char> receive_from_parent(int* fd) { return receive_message(kChildSocket, fd); }

void must(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "a child of the test failed: %s\n", what);
  _exit(1);
}

ChildFunction::ChildFunction(const char* name, void (*function)()) {
  functions().emplace(name, function);
}

bool run_child(int argc, char** argv) {
  if (argc != 3 || std::string_view(argv[1]) != kChildOption) return false;
  alarm(static_cast<unsigned>(kBound.count()));
  // For those that fault on purpose: a signal, even where a sanitizer would report it, and no core.
  signal(SIGSEGV, SIG_DFL);
  const rlimit no_core = {};
  setrlimit(RLIMIT_CORE, &no_core);
  const auto found = functions().find(argv[2]);
  must(found != functions().end(), "a function of this name");
  found->second();
  return true;
}

}  // namespace ringcomm::emulator::testing
