// What csrc/cuda uses of CUDA, on a CPU: a thread is a fiber, the lanes of a warp meet at a shuffle, the threads of a
// block at a barrier, those of a cluster at its own. Included before a source; `emulation.cpp` is compiled once for all.
#pragma once
#define KERNELHUB_EMULATED 1

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define INLINE static inline
#define memcpy __builtin_memcpy
#define INLINE_METHOD inline

struct Dim {
  unsigned x;
};
extern "C" {
extern Dim threadIdx, blockIdx, blockDim, gridDim;
extern unsigned emulated_rank, emulated_cluster;
void __syncthreads();
void sync_cluster();
void emulated_yield();
void emulated_found();
unsigned emulated_exchange(unsigned value, unsigned lane);
// Up to 8 words of every lane, for all lanes until they meet again; NaN of a lane that has ended, or gives no words.
const unsigned (*emulated_meet(const unsigned* words, unsigned num))[8];
// Of kernels that pass values between ranks, which `ranks.cpp` runs.
unsigned long long emulated_nanoseconds();
void emulated_send(unsigned long long to, const unsigned* words);
void emulated_look(unsigned long long at, unsigned* words);
int emulated_any_of_block(int mine);
int emulated_launch(
    void (*body)(const void*), const void* parameters, unsigned cluster, unsigned blocks, unsigned threads, int backwards);
}

// Each block of a cluster has a copy of a shared variable of this kind.
#define HAS_CLUSTERS 1
#define SHARED_BY_CLUSTER(Type, name) \
  static Type of_blocks_##name[8];    \
  Type& name = of_blocks_##name[emulated_rank]
static inline unsigned rank_in_cluster() { return emulated_rank; }
static inline unsigned blocks_of_cluster() { return emulated_cluster; }
template <typename T> static inline T& in_block(T& mine, unsigned rank) { return (&mine)[(int)rank - (int)emulated_rank]; }

static inline unsigned bits_of(float x) {
  unsigned bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
static inline float float_of(unsigned bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
static inline float __shfl_xor_sync(unsigned, float x, int step) {
  return float_of(emulated_exchange(bits_of(x), (threadIdx.x % 32) ^ (unsigned)step));
}
static inline float __shfl_sync(unsigned, float x, int lane) {
  return float_of(emulated_exchange(bits_of(x), (unsigned)lane % 32));
}
static inline unsigned __shfl_sync(unsigned, unsigned x, int lane) { return emulated_exchange(x, (unsigned)lane % 32); }
static inline unsigned __shfl_up_sync(unsigned, unsigned x, unsigned step) {
  unsigned lane = threadIdx.x % 32;
  return emulated_exchange(x, lane < step ? lane : lane - step);
}
static inline unsigned atomicAdd(unsigned* at, unsigned x) {
  unsigned before = *at;
  *at += x;
  return before;
}
static inline void __threadfence() {}
static inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  for (unsigned step = 16; step; step /= 2) {
    unsigned other = emulated_exchange(x, (threadIdx.x % 32) ^ step);
    x = other > x ? other : x;
  }
  return x;
}
static inline unsigned __reduce_min_sync(unsigned, unsigned x) { return ~__reduce_max_sync(~0u, ~x); }
static inline unsigned __reduce_add_sync(unsigned, unsigned x) {
  for (unsigned step = 16; step; step /= 2) x += emulated_exchange(x, (threadIdx.x % 32) ^ step);
  return x;
}
static inline void __syncwarp() { emulated_exchange(0, threadIdx.x % 32); }
static inline float fmaxf(float x, float y) { return x != x ? y : y != y ? x : x > y ? x : y; }
static inline float fminf(float x, float y) { return x != x ? y : y != y ? x : x < y ? x : y; }
static inline float fabsf(float x) { return __builtin_fabsf(x); }
static inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static inline float sqrtf(float x) { return __builtin_sqrtf(x); }
static inline float expf(float x) { return __builtin_expf(x); }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __expf(float x) { return __builtin_expf(x); }
static inline float __fdividef(float x, float y) { return x / y; }
static inline float logf(float x) { return __builtin_logf(x); }

static inline float half_to_float(unsigned short bits) {
  _Float16 half;
  __builtin_memcpy(&half, &bits, 2);
  return (float)half;
}
static inline unsigned short float_to_half(float x) {
  _Float16 half = (_Float16)x;
  unsigned short bits;
  __builtin_memcpy(&bits, &half, 2);
  return bits;
}

// The entry of the host: 0, or what went wrong.
#define EMULATED(kernel, Parameters)                                                                                   \
  extern "C" int emulated_##kernel(                                                                                    \
      const void* given, unsigned cluster, unsigned blocks, unsigned threads, int backwards) {                         \
    return emulated_launch(                                                                                            \
        [](const void* p) { kernel(*(const Parameters*)p); }, given, cluster, blocks, threads, backwards);             \
  }                                                                                                                    \
  extern "C" void run_##kernel(const void* p) { kernel(*(const Parameters*)p); }                                       \
  extern "C" unsigned size_of_##kernel() { return sizeof(Parameters); }
