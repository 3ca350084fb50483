#pragma once

/// RINGCOMM_HD: for functions that GPU kernels call too. Loops in kernels are unrolled fully, which
/// keeps arrays in registers, or not at all, where speed is not worth the registers.
#ifdef __CUDACC__
#define RINGCOMM_HD __host__ __device__
#define RINGCOMM_UNROLL _Pragma("unroll")
#define RINGCOMM_ROLLED _Pragma("unroll 1")
#else
#define RINGCOMM_HD
#define RINGCOMM_UNROLL
#define RINGCOMM_ROLLED
#endif

/// Marks a point where a process may die between two actions that its peers see: tests compiled
/// with RINGCOMM_TEST_STEPS kill a rank at each of them (tests/cpp/test_deaths.cc).
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
