// Breaks the rules of test_counts.cc where its stride is not 1. One warp.
extern "C" __global__ void ringcomm_strided(const unsigned* from, unsigned* to, unsigned stride) {
  __shared__ unsigned words[32 * 8];
  const unsigned i = threadIdx.x * stride;
  words[i] = from[i];
  __syncthreads();
  to[i] = words[i];
}
