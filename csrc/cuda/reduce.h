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

// Integers of floats other than NaN in their order, from that of -inf, 0x007FFFFF, up; -0 is 0.
INLINE u32 ordered(float x) {
  u32 bits = bits_of(x + 0.0f);
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

INLINE float value_of_ordered(u32 key) { return float_of(key & 0x80000000 ? key & 0x7FFFFFFF : ~key); }

// The largest and the least integer of a warp, known to all lanes.
INLINE u32 most_of_warp(u32 x) { return __reduce_max_sync(~0u, x); }
INLINE u32 least_of_warp(u32 x) { return __reduce_min_sync(~0u, x); }

// Sum over the lanes up to one.
INLINE u32 sum_until(u32 x) {
  int lane = threadIdx.x % WARP;
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    u32 other = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

// Over a block of whole warps, known to all threads; `x` of the largest is a number that is not negative. `room` has 32
// elements of shared memory, and may be used again once all threads have passed another barrier.
INLINE float largest_of_warp(float x) { return float_of(most_of_warp(bits_of(x))); }

INLINE float largest_of_block(float x, float* room) {
  x = largest_of_warp(x);
  if (blockDim.x <= WARP) return x;
  int lane = threadIdx.x % WARP;
  if (lane == 0) room[threadIdx.x / WARP] = x;
  __syncthreads();
  return largest_of_warp(lane < (int)blockDim.x / WARP ? room[lane] : 0.0f);
}

INLINE float sum_of_block(float x, float* room) {
  x = sum_of_lanes<WARP>(x);
  if (blockDim.x <= WARP) return x;
  int lane = threadIdx.x % WARP;
  if (lane == 0) room[threadIdx.x / WARP] = x;
  __syncthreads();
  return sum_of_lanes<WARP>(lane < (int)blockDim.x / WARP ? room[lane] : 0.0f);
}

// Sum over the threads of a block before one; `total` over all. `room` has 32 elements, and may be used again at once.
INLINE u32 sum_before(u32 x, u32* room, u32& total) {
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
  u32 until = sum_until(x);
  if (lane == WARP - 1) room[warp] = until;
  __syncthreads();
  u32 until_warp = sum_until(lane < warps ? room[lane] : 0);
  total = __shfl_sync(~0u, until_warp, WARP - 1);
  u32 before_warp = __shfl_sync(~0u, until_warp, warp - 1);
  __syncthreads();
  return (warp ? before_warp : 0) + until - x;
}
