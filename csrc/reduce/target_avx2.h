#pragma once

// Functions from here to the end of the including file are compiled for AVX2, F16C and FMA; to the
// end, because templates are instantiated there. The includer must define RINGCOMM_VECTOR_BYTES
// first, and end with the pop that clang requires.

// All headers of the standard library and the compiler must precede the pragma; see vectors.h.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,fma")
#endif

#include "reduce/vectors.h"
