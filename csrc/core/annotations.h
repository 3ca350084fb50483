#pragma once

/// On functions of core and device that kernels of a GPU call too.
#ifdef __CUDACC__
#define RINGCOMM_HD __host__ __device__
#else
#define RINGCOMM_HD
#endif
