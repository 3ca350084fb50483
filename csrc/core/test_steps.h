#pragma once

/// Marks a point where a process may die between two actions that its peers see. Tests compiled
/// with RINGCOMM_TEST_STEPS kill a rank at each of them (tests/cpp/test_deaths.cc). In the library
/// the macro expands to nothing.
#ifdef RINGCOMM_TEST_STEPS
namespace ringcomm {
inline void (*test_step)(const char* what) = nullptr;  ///< set before threads start
}
#define RINGCOMM_STEP(what)                                            \
  do {                                                                 \
    if (::ringcomm::test_step != nullptr) ::ringcomm::test_step(what); \
  } while (false)
#else
#define RINGCOMM_STEP(what) static_cast<void>(0)
#endif
