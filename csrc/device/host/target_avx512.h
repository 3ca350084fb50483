#pragma once

// From here to the end of the file that includes this, functions are compiled for AVX-512 F, BW, DQ
// and VL (Skylake-SP, Zen 4 and later). To the end, because that is where templates are compiled.
// The includer has defined RINGCOMM_VECTOR_BYTES, and ends with the pop that clang wants.

// Everything of the standard library and of the compiler comes before the pragma; see vectors.h.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "device/host/vectors.h"
