// What `warp_products.h` has of instructions, on a CPU. Lanes give each other what they have when they meet. A copy happens
// when it is waited for, or at once if `emulated_early`: so both a missing wait and a place that is used too soon show.
#pragma once

struct float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int min(int x, int y) { return x < y ? x : y; }
static inline unsigned min(unsigned x, unsigned y) { return x < y ? x : y; }
static inline int max(int x, int y) { return x > y ? x : y; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline unsigned __ballot_sync(unsigned, bool x) { return __reduce_add_sync(~0u, (unsigned)x << threadIdx.x % 32); }
static inline int __shfl_sync(unsigned, int x, int lane) { return emulated_exchange(x, lane); }
static inline bool any_of_warp(bool x) { return __ballot_sync(~0u, x) != 0; }
static inline float exp2_of(float x) { return __builtin_exp2f(x); }
static inline float log2_of(float x) { return __builtin_log2f(x); }

static char* emulated_shared;
static unsigned emulated_shared_bytes;
#define DYNAMIC_SHARED(name, bytes)       \
  alignas(128) static char name[bytes]; \
  emulated_shared = name;                 \
  emulated_shared_bytes = bytes
static inline u32 address_in_shared(const void* of) { return (u32)((const char*)of - emulated_shared); }
static inline char* in_shared(u32 at) {
  if (at % 16 || at + 16 > emulated_shared_bytes) __builtin_trap();
  return emulated_shared + at;
}

struct PendingCopy {
  u32 to;
  const char* from;
  bool there;
  int group;
};
constexpr int EMULATED_PENDING = 1 << 12;
static PendingCopy emulated_pending[128][EMULATED_PENDING];
static int emulated_first[128], emulated_end[128], emulated_group[128];
extern "C" {
int emulated_early;
}

static inline void do_copy(const PendingCopy& copy) {
  if (copy.there) memcpy(in_shared(copy.to), copy.from, 16);
  else __builtin_memset(in_shared(copy.to), 0, 16);
}
static inline void copy_16(u32 to, const char* from, bool there) {
  if ((u64)from % 16) __builtin_trap();
  int thread = threadIdx.x;
  PendingCopy copy = {to, from, there, emulated_group[thread]};
  if (emulated_early) return do_copy(copy);
  emulated_pending[thread][emulated_end[thread]++ % EMULATED_PENDING] = copy;
}
static inline void copy_16(u32 to, const char* from) { copy_16(to, from, true); }
static inline void copies_end() { emulated_group[threadIdx.x]++; }
template <int LEFT> static inline void copies_wait() {
  int thread = threadIdx.x;
  while (emulated_first[thread] < emulated_end[thread]) {
    const PendingCopy& copy = emulated_pending[thread][emulated_first[thread] % EMULATED_PENDING];
    if (copy.group >= emulated_group[thread] - LEFT) break;
    do_copy(copy);
    emulated_first[thread]++;
  }
}

static inline Words read_words(u32 at) {
  Words x;
  memcpy(&x, in_shared(at), 16);
  return x;
}
static inline Words read_transposed(u32 at) {
  Words x;
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto given = emulated_meet(&at, 1);
  for (int i = 0; i < 4; i++) {
    u32 word = 0;
    for (int k = 0; k < 2; k++) {
      u32 row = given[8 * i + 2 * t + k][0];  // row 2 t + k, column g
      u16 pair;
      memcpy(&pair, in_shared(row) + 2 * g, 2);
      word |= (u32)pair << 16 * k;
    }
    x.at[i] = word;
  }
  return x;
}
static inline u32 transposed(u32 x) {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  u32 made = 0;
  auto given = emulated_meet(&x, 1);
  for (int k = 0; k < 2; k++) {  // row 2 t + k, column g
    u32 other = given[4 * (2 * t + k) + g / 2][0];
    made |= (other >> 16 * (g % 2) & 0xFFFF) << 16 * k;
  }
  return made;
}
static inline float number_of(u32 pair, int half, bf16) { return widened(bf16{(u16)(pair >> 16 * half)}); }
static inline float number_of(u32 pair, int half, f16) { return widened(f16{(u16)(pair >> 16 * half)}); }
template <typename T> static inline void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], T tag) {
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  u32 mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  auto given = emulated_meet(mine, 6);
  float rows[2][16], columns[2][16];  // of a rows g and g + 8, of b columns 2 t and 2 t + 1
  for (int k = 0; k < 16; k++)
    for (int i = 0; i < 2; i++) {
      rows[i][k] = number_of(given[4 * g + k / 2 % 4][k / 8 * 2 + i], k % 2, tag);
      columns[i][k] = number_of(given[4 * (2 * t + i) + k / 2 % 4][4 + k / 8], k % 2, tag);
    }
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++) d[i] += rows[i / 2][k] * columns[i % 2][k];
}
static inline u32 permuted(u32 x, u32 selector) {
  u64 bytes = x;
  u32 made = 0;
  for (int i = 0; i < 4; i++) made |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return made;
}
static inline u32 half_of_e4m3(u8 code) {
  return (code & 0x7F) == 0x7F ? 0x7E00 | (code & 0x80) << 8 : float_to_half(e4m3_value(code));
}
static inline void widen_e4m3(u32 codes, u32& low, u32& high) {
  low = half_of_e4m3(codes & 0xFF) | half_of_e4m3(codes >> 8 & 0xFF) << 16;
  high = half_of_e4m3(codes >> 16 & 0xFF) | half_of_e4m3(codes >> 24) << 16;
}
