#pragma once

// Functions from here to the end of the including file are compiled for AVX-512 F, BW, DQ and VL
// (Skylake-SP, Zen 4 and later); to the end, because templates are instantiated there. The includer
// must define RINGCOMM_VECTOR_BYTES first, and end with the pop that clang requires.

// All headers of the standard library and the compiler must precede the pragma; see vectors.h.
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

#include "reduce/vectors.h"
