#pragma once

/// On functions of core and device that kernels of a GPU call too.
#ifdef __CUDACC__
#define RINGCOMM_HD __host__ __device__
#else
#define RINGCOMM_HD
#endif

/// In front of loops of kernels: all turns in a row, so that what they hold stays in registers, or
/// one at a time, in code that is not worth the registers that more would take, or four.
#ifdef __CUDACC__
#define RINGCOMM_UNROLL _Pragma("unroll")
#define RINGCOMM_ROLLED _Pragma("unroll 1")
#define RINGCOMM_UNROLL_BY_4 _Pragma("unroll 4")
#else
#define RINGCOMM_UNROLL
#define RINGCOMM_UNROLL_BY_4
#define RINGCOMM_ROLLED
#endif
