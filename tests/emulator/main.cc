// The main of the emulator's tests. They run in this process, on two GPUs of two multiprocessors,
// and in children, which are ranks or have other settings.
#define DOCTEST_CONFIG_IMPLEMENT
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "emulator/child_process.h"
#include "third_party/doctest/doctest.h"

int main(int argc, char** argv) {
  // TSan's exit would wait for threads of the emulator, which never end.
  if (ringcomm::emulator::testing::run_child(argc, argv)) _exit(0);
  setenv("RINGCOMM_CUDA_DRIVER", RINGCOMM_EMULATOR_LIBRARY, 1);
  setenv("RINGCOMM_EMULATOR_DEVICES", "2", 1);
  setenv("RINGCOMM_EMULATOR_SMS", "2", 1);
  setenv("RINGCOMM_EMULATOR_BOX", std::to_string(getpid()).c_str(), 1);  // other tests have others
  alarm(300);
  return doctest::Context(argc, argv).run();
}
