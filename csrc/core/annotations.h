#pragma once

/// For functions of core and device that GPU kernels call too.
#ifdef __CUDACC__
#define RINGCOMM_HD __host__ __device__
#else
#define RINGCOMM_HD
#endif

/// Loop unrolling in kernels: fully, which keeps arrays in registers; or not at all, where speed is
/// not worth the registers.
#ifdef __CUDACC__
#define RINGCOMM_UNROLL _Pragma("unroll")
#define RINGCOMM_ROLLED _Pragma("unroll 1")
#else
#define RINGCOMM_UNROLL
#define RINGCOMM_ROLLED
#endif
