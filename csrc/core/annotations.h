#pragma once

/// On functions of core and device that kernels of a GPU call too.
#ifdef __CUDACC__
#define RINGCOMM_HD __host__ __device__
#else
#define RINGCOMM_HD
#endif

/// On functions that many kernels call, and none for its speed: compiled once.
#ifdef __CUDACC__
#define RINGCOMM_APART __noinline__
#else
#define RINGCOMM_APART [[gnu::noinline]]
#endif
