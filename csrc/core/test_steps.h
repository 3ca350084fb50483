#pragma once

/// Where a process may end between two things that its peers see. Tests that are compiled with
/// RINGCOMM_TEST_STEPS count these places and end a rank at each (tests/cpp/test_deaths.cc); in the
/// library there is nothing.
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
