// In place of csrc/cuda/warpgroup.h and register_products.h: TMA, barriers and products of a warpgroup on a CPU.
//
// Copies end, and products read and add, as late as the program allows, or at once (`emulated_late`): what is overwritten
// too early, or read before it has come, gives wrong numbers.
#pragma once
#include "formats.h"

struct float4 {
  float x, y, z, w;
};
struct uint4 {
  unsigned x, y, z, w;
};
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline int min(int x, int y) { return x < y ? x : y; }
static inline int max(int x, int y) { return x > y ? x : y; }
static inline int __shfl_sync(unsigned, int x, int lane) { return emulated_exchange(x, lane); }
static inline int atomicAdd(int* at, int x) {
  int before = *at;
  *at += x;
  return before;
}
static inline u32 __byte_perm(u32 x, u32 y, u32 pick) {
  u64 both = (u64)y << 32 | x;
  u32 made = 0;
  for (int i = 0; i < 4; i++) made |= (u32)(both >> (8 * (pick >> (4 * i) & 7)) & 255) << (8 * i);
  return made;
}

constexpr u32 EMULATED_BYTES = 232448;
alignas(1024) static char emulated_memory[EMULATED_BYTES];
static int emulated_late;
static u32 emulated_random = 1;
static inline u32 drawn() { return emulated_random = emulated_random * 1664525u + 1013904223u; }

struct TensorMap {
  const char* base;
  i64 rows, columns, row_bytes;
  int item, box_rows, box_columns, swizzle;  // 1 to 3: of 32, 64 and 128 bytes
};
#define TENSOR_MAP(name) const TensorMap& name

// --- barriers

struct Barrier {
  u32 expected, pending, phase;
  i64 bytes;
};
static Barrier emulated_barriers[EMULATED_BYTES / 8];
static inline void barrier_turn(Barrier& bar) {
  if (bar.pending || bar.bytes) return;
  bar.phase ^= 1;
  bar.pending = bar.expected;
}
INLINE void barrier_begin(u32 bar, u32 arrivals) { emulated_barriers[bar / 8] = {arrivals, arrivals, 0, 0}; }
INLINE void barrier_arrive(u32 bar) {
  if (!emulated_barriers[bar / 8].pending) __builtin_trap();  // more arrivals than it was begun for
  emulated_barriers[bar / 8].pending--;
  barrier_turn(emulated_barriers[bar / 8]);
}
INLINE void barrier_expect(u32 bar, u32 bytes) {
  emulated_barriers[bar / 8].bytes += bytes;
  barrier_arrive(bar);
}
INLINE void barrier_arrive_warp(u32 bar) {
  __syncwarp();
  if (threadIdx.x % WARP == 0) barrier_arrive(bar);
}

struct Copy {
  u32 to, bar;
  const TensorMap* map;
  int column, row;
};
static Copy emulated_copies[4096];
static int emulated_under_way;
static inline void copy_now(int which) {
  Copy of = emulated_copies[which];
  emulated_copies[which] = emulated_copies[--emulated_under_way];
  const TensorMap& map = *of.map;
  int row_bytes = map.box_columns * map.item;
  for (int row = 0; row < map.box_rows; row++) {
    for (int at = 0; at < row_bytes; at++) {
      int column = of.column + at / map.item;
      bool there = of.row + row < map.rows && column < map.columns;
      u32 to = of.to + row * row_bytes + at;
      to ^= (to >> 3) & ((1 << (map.swizzle + 4)) - 16);
      emulated_memory[to] = there ? map.base[(of.row + row) * map.row_bytes + (i64)of.column * map.item + at] : 0;
    }
  }
  emulated_barriers[of.bar / 8].bytes -= (i64)row_bytes * map.box_rows;
  barrier_turn(emulated_barriers[of.bar / 8]);
}
INLINE void tma_load(u32 to, const TensorMap* map, int column, int row, u32 bar) {
  emulated_copies[emulated_under_way++] = {to, bar, map, column, row};
  if (!emulated_late) copy_now(emulated_under_way - 1);
}
INLINE void barrier_wait(u32 bar, u32 phase) {
  while (emulated_barriers[bar / 8].phase == phase) {
    if (emulated_under_way && drawn() >> 28 == 0) {
      copy_now(drawn() % emulated_under_way);
      emulated_found();
    }
    emulated_yield();
  }
  emulated_found();
}
INLINE void fence_async() {}
INLINE void fence_barriers() {
  for (u32 i = 0; i < EMULATED_BYTES; i++) emulated_memory[i] = (char)0xFF;  // NaN of every format
}
template <int THREADS> INLINE void sync_threads_of(int number) {
  static int arrived[16], turns[16];
  int turn = turns[number];
  if (++arrived[number] == THREADS) {
    arrived[number] = 0;
    turns[number]++;
  }
  while (turns[number] == turn) emulated_yield();
  emulated_found();
}
INLINE void tma_prefetch_map(const TensorMap*) {}
template <int COUNT> INLINE void take_registers() {}
template <int COUNT> INLINE void give_registers() {}
INLINE u32 shared_address(const void* of) { return (u32)((const char*)of - emulated_memory); }
INLINE u32 operand_along(u32 address) { return address >> 4; }
INLINE u32 afresh(u32 x) { return x; }

// --- products

struct Product {
  float* d;
  const u32* a;
  u32 b;
  int sums, group;
};
struct Products {  // of a thread
  Product at[64];
  int count, groups, done;
};
static Products emulated_products[256];
static u32 emulated_registers[8][4 * WARP];

static inline float bf16_at(u32 address) { return float_of((u32) * (u16*)(emulated_memory + address) << 16); }
static inline void product_now(const Product& of) {
  int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  u32* mine = emulated_registers[warp];
  for (int i = 0; i < 4; i++) mine[4 * lane + i] = of.a[i];
  __syncwarp();
  float rows[2][16];
  for (int lower = 0; lower < 2; lower++) {
    for (int k = 0; k < 16; k++) {
      u32 pair = mine[4 * (lane / 4 * 4 + k % 8 / 2) + 2 * (k / 8) + lower];
      rows[lower][k] = float_of(k % 2 ? pair & 0xFFFF0000u : pair << 16);
    }
  }
  __syncwarp();
  for (int i = 0; i < of.sums; i++) {
    int column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; k++) {
      u32 at = (of.b << 4) + column / 8 * 1024 + column % 8 * 128 + 2 * k;
      sum += rows[i / 2 % 2][k] * bf16_at(at ^ ((at >> 3) & 0x70));
    }
    of.d[i] += sum;
  }
}
INLINE void products_begin() {}
INLINE void products_end() { emulated_products[threadIdx.x].groups++; }
template <int SUMS> INLINE void multiply_made(float (&d)[SUMS], const u32* a, u32 b) {
  Products& mine = emulated_products[threadIdx.x];
  mine.at[mine.count++] = {d, a, b, SUMS, mine.groups};
  if (!emulated_late) product_now(mine.at[--mine.count]);
}
template <int LEFT> INLINE void made_wait() {
  Products& mine = emulated_products[threadIdx.x];
  int left = 0;
  for (int i = 0; i < mine.count; i++) {
    if (mine.at[i].group < mine.groups - LEFT) product_now(mine.at[i]);
    else mine.at[left++] = mine.at[i];
  }
  mine.count = left;
}
template <int COUNT> INLINE void settle(float (&)[COUNT]) {}
template <int COUNT> INLINE void keep(u32 (&)[COUNT]) {}

INLINE u32 times_pair(u32 x, u32 y) {
  return narrow_pair(float_of(x << 16) * float_of(y << 16), float_of(x & 0xFFFF0000u) * float_of(y & 0xFFFF0000u), bf16());
}
INLINE void widen_e4m3(u32 pair, float& low, float& high) {
  auto of = [](u8 raw) { return (raw & 0x7F) == 0x7F ? __builtin_nanf("") : e4m3_value(raw); };
  low = of((u8)pair), high = of((u8)(pair >> 8));
}

template <int COUNT> INLINE void load_words(u32 (&x)[COUNT], u32 from) {
  if (from % (4 * COUNT) || from + 4 * COUNT > EMULATED_BYTES) __builtin_trap();
  memcpy(x, emulated_memory + from, sizeof x);
}
template <int COUNT> INLINE void store_words(u32 to, const u32 (&x)[COUNT]) {
  if (to % (4 * COUNT) || to + 4 * COUNT > EMULATED_BYTES) __builtin_trap();
  memcpy(emulated_memory + to, x, sizeof x);
}
INLINE void store_transposed(u32 to, const u32 (&x)[4]) {
  int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  u32* mine = emulated_registers[warp];
  for (int i = 0; i < 4; i++) mine[4 * lane + i] = x[i];
  __syncwarp();
  for (int row = 0; row < 8; row++) {
    u32 pair = mine[4 * (4 * row + lane % 8 / 2) + lane / 8];
    ((u16*)(emulated_memory + to))[row] = (u16)(lane % 2 ? pair >> 16 : pair);
  }
  __syncwarp();
}
INLINE float4 load_written(const float4* from) { return *from; }
