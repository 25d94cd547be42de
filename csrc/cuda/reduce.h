// Reductions over lanes of a warp and threads of a block.
#pragma once
#include "formats.h"

// The largest over OVER neighbours, known to all of them.
template <int OVER> INLINE float largest_of_lanes(float x) {
#pragma unroll
  for (int step = OVER / 2; step; step /= 2) x = larger(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

template <int OVER> INLINE float sum_of_lanes(float x) {
#pragma unroll
  for (int step = OVER / 2; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Over a block of whole warps, known to all threads. `room` has 32 elements of shared memory, and may be used again
// once all threads have passed another barrier.
INLINE float largest_of_block(float x, float* room) {
  x = largest_of_lanes<WARP>(x);
  if (blockDim.x <= WARP) return x;
  if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = x;
  __syncthreads();
  x = room[0];
  for (int warp = 1; warp < (int)blockDim.x / WARP; warp++) x = larger(x, room[warp]);
  return x;
}

INLINE float sum_of_block(float x, float* room) {
  x = sum_of_lanes<WARP>(x);
  if (blockDim.x <= WARP) return x;
  if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = x;
  __syncthreads();
  x = room[0];
  for (int warp = 1; warp < (int)blockDim.x / WARP; warp++) x += room[warp];
  return x;
}
