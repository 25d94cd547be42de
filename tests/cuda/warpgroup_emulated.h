// What a kernel uses of csrc/cuda/warpgroup.h, on a CPU: every thread of the blocks of a cluster is a fiber, and a seed
// chooses which one goes on. Copies by TMA happen at any time until they are waited for, products at once or when they
// are waited for. What is loaded into is filled with NaN first, so that reads that come too early or too late show.
//
// `TEST_PLACES`, the functions of the header that work out addresses, come from there.
#pragma once
#pragma push_macro("memcpy")
#undef memcpy
#include "fibers.h"
#include <string.h>
#include <sys/mman.h>

#include <functional>
#include <string>
#include <vector>
#pragma pop_macro("memcpy")
#include "formats.h"

static inline int min(int x, int y) { return x < y ? x : y; }
template <typename T> static inline T __ldg(const T* at) { return *at; }

struct TensorMap {
  char* base;
  i64 rows, columns, stride, item, box_rows, box_columns, swizzle;
};
#define __grid_constant__
#define TENSOR_MAP(name) const TensorMap& name

// --- fibers

struct Fiber {
  Stack stack;
  unsigned block, thread, arrived_in;
  bool ended;
  std::function<bool()> ready;
  std::vector<std::function<void()>> products;  // issued, in groups
  std::vector<size_t> groups;
  std::vector<std::function<void()>> stores;
};
struct Barrier {
  int count, pending;
  i64 bytes;
  unsigned phase;
};
struct Named {
  unsigned arrived, generation;
};
struct Block {
  std::vector<char> memory;
  Barrier barriers[64];
  Named named[17];
  unsigned exchanged[32][2], met[32], round[32], values[32][2][32];
  unsigned running;
};
struct Copy {
  std::function<void()> run;
};

extern "C" {
Dim threadIdx, blockIdx, blockDim, gridDim;
unsigned emulated_rank, emulated_cluster;
}
static std::vector<Fiber> fibers;
static std::vector<Block> blocks;
static std::vector<Copy> copies;
static Fiber* now;
static Stack scheduler;
static std::string fault;
static u64 random_state;
static unsigned first_block, cluster_met, cluster_round;
static bool lazy;

static unsigned drawn(unsigned below) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)(random_state >> 33) % below;
}
static void failed(const std::string& why) {
  if (fault.empty()) fault = why;
}
static Block& mine() { return blocks[now->block]; }
static void wait_until(std::function<bool()> ready) {
  if (ready() && drawn(4)) return;
  now->ready = ready;
  go_on(now->stack, scheduler);
}

extern "C" unsigned emulated_exchange(unsigned value, unsigned lane) {
  Block& block = mine();
  unsigned warp = threadIdx.x / 32, round = block.round[warp], at = threadIdx.x % 32;
  block.values[warp][round % 2][at] = value;
  if (++block.met[warp] == 32) block.met[warp] = 0, block.round[warp]++;
  else wait_until([&block, warp, round] { return block.round[warp] != round; });
  return block.values[warp][round % 2][lane];
}
static void meet(int number, unsigned threads) {
  Named& named = mine().named[number];
  unsigned generation = named.generation;
  if (++named.arrived == threads) named.arrived = 0, named.generation++;
  else wait_until([&named, generation] { return named.generation != generation; });
}
extern "C" void __syncthreads() { meet(16, blockDim.x); }
INLINE void arrive_in_cluster() {
  if (now->arrived_in) failed("two arrivals in a cluster without a wait");
  now->arrived_in = 1 + cluster_round;
  if (++cluster_met == blockDim.x * emulated_cluster) cluster_met = 0, cluster_round++;
}
INLINE void wait_for_cluster() {
  unsigned round = now->arrived_in;
  if (!round) failed("a wait in a cluster without an arrival");
  now->arrived_in = 0;
  wait_until([round] { return cluster_round != round - 1; });
}
extern "C" void sync_cluster() { arrive_in_cluster(), wait_for_cluster(); }
template <int THREADS> INLINE void sync_threads_of(int number) { meet(number, THREADS); }

// --- barriers in shared memory

static char* emulated_memory() { return mine().memory.data(); }
INLINE u32 shared_address(const void*) { return 0; }
static char* at_address(unsigned block, u32 address, u32 bytes) {
  if (address + bytes > blocks[block].memory.size()) failed("an address past shared memory"), address = 0;
  return blocks[block].memory.data() + address;
}
static u32 barriers_at = 0;
static Barrier& barrier(unsigned block, u32 bar) {
  if (!barriers_at) barriers_at = bar;  // the first one that is begun
  unsigned at = (bar - barriers_at) / 8;
  if (bar < barriers_at || at >= 64) failed("not the address of a barrier"), at = 0;
  if (!blocks[block].running) failed("a barrier of a block that has ended");
  return blocks[block].barriers[at];
}
static void settle(Barrier& bar) {
  if (bar.pending < 0) failed("more arrivals at a barrier than it expects");
  if (bar.pending == 0 && bar.bytes == 0) bar.pending = bar.count, bar.phase ^= 1;
}
INLINE void barrier_begin(u32 bar, u32 arrivals) { barrier(now->block, bar) = {(int)arrivals, (int)arrivals, 0, 0}; }
static void arrive(unsigned block, u32 bar, i64 bytes) {
  Barrier& of = barrier(block, bar);
  of.bytes += bytes;
  of.pending--;
  settle(of);
}
INLINE void barrier_arrive(u32 bar) { arrive(now->block, bar, 0); }
INLINE void barrier_arrive_in(u32 bar, u32 rank) { arrive(rank, bar, 0); }
INLINE void barrier_expect(u32 bar, u32 bytes) { arrive(now->block, bar, bytes); }
INLINE void barrier_wait(u32 bar, u32 phase) {
  Barrier& of = barrier(now->block, bar);
  wait_until([&of, phase] { return of.phase != phase; });
}
INLINE void barrier_wait_for_cluster(u32 bar, u32 phase) { barrier_wait(bar, phase); }
INLINE void fence_async() {}
INLINE void fence_barriers() {}

// --- copies

static u32 swizzled(u32 address, bool swizzle) { return swizzle ? address ^ (address >> 3 & 0x70) : address; }
static u32 bytes_of(const TensorMap& map) { return map.box_rows * map.box_columns * map.item; }

static void load(u32 to, const TensorMap* given, int column, int row, u32 bar, u32 to_blocks) {
  TensorMap map = *given;
  u32 bytes = bytes_of(map), width = map.box_columns * map.item;
  if (to % (map.swizzle ? 1024 : 128)) failed("a copy to an address that is not aligned");
  for (unsigned block = 0; block < emulated_cluster; block++) {
    if (!(to_blocks >> block & 1)) continue;
    memset(at_address(block, to, bytes), map.item == 4 ? 0xFF : 0x7F, bytes);
    copies.push_back({[=] {
      char* into = at_address(block, 0, 0);
      for (i64 at = 0; at < map.box_rows; at++) {
        for (u32 byte = 0; byte < width; byte++) {
          i64 from_row = row + at, from = column * map.item + byte;
          bool there = from_row >= 0 && from_row < map.rows && from < map.columns * map.item;
          into[swizzled(to + at * width + byte, map.swizzle)] = there ? map.base[from_row * map.stride + from] : 0;
        }
      }
      Barrier& of = barrier(block, bar);
      of.bytes -= bytes;
      settle(of);
    }});
  }
}
INLINE void tma_load(u32 to, const TensorMap* map, int column, int row, u32 bar) {
  load(to, map, column, row, bar, 1u << now->block);
}
INLINE void tma_load_all(u32 to, const TensorMap* map, int column, int row, u32 bar, u16 to_blocks) {
  load(to, map, column, row, bar, to_blocks);
}
// The address in another block: its rank above the 20 bits of an address.
INLINE u32 address_in(u32 address, u32 rank) { return rank << 20 | address; }
INLINE void send_floats(u32 to, const float* x, u32 bar) {
  unsigned block = to >> 20;
  u32 address = to & 0xFFFFF;
  if (block >= emulated_cluster || bar >> 20 != block) failed("numbers and their barrier are in different blocks");
  if (address % 16) failed("numbers to an address that is not aligned");
  if (!fault.empty()) return;
  std::vector<float> sent(x, x + 4);
  memset(at_address(block, address, 16), 0xFF, 16);
  copies.push_back({[=] {
    Barrier& of = barrier(block, bar & 0xFFFFF);
    memcpy(at_address(block, address, 16), sent.data(), 16);
    of.bytes -= 16;
    settle(of);
  }});
}
// Of 16 bytes that are partly outside of the tensor all are written, as an H200 does.
INLINE void tma_store(u32 from, const TensorMap* given, int column, int row) {
  TensorMap map = *given;
  unsigned block = now->block;
  now->stores.push_back([=] {
    u32 width = map.box_columns * map.item;
    for (i64 at = 0; at < map.box_rows; at++) {
      for (u32 byte = 0; byte < width; byte++) {
        i64 to_row = row + at, to = column * map.item + byte;
        if (to_row < map.rows && to / 16 * 16 < map.columns * map.item)
          map.base[to_row * map.stride + to] = *at_address(block, swizzled(from + at * width + byte, true), 1);
      }
    }
  });
}
static void store_all(Fiber& fiber) {
  for (auto& store : fiber.stores) store();
  fiber.stores.clear();
}
INLINE void tma_stores_end() {
  if (!lazy) store_all(*now);
}
INLINE void tma_stores_read() { store_all(*now); }
INLINE void tma_stores_done() { store_all(*now); }
INLINE void tma_prefetch_map(const TensorMap*) {}
template <int COUNT> INLINE void take_registers() {}
template <int COUNT> INLINE void give_registers() {}
INLINE u32 afresh(u32 x) { return x; }
INLINE void keep(float&) {}
INLINE float within(float x, float most) { return x > most ? most : x < -most ? -most : x; }
INLINE float load_shared(u32 from) {
  float x;
  memcpy(&x, at_address(now->block, from, 4), 4);
  return x;
}

INLINE void load_shared_vector(float (&x)[4], u32 from) { memcpy(x, at_address(now->block, from, 16), 16); }

// --- products

static float of_e4m3(u8 code) {
  int exponent = code >> 3 & 15, mantissa = code & 7;
  float size = exponent ? __builtin_ldexpf(8 + mantissa, exponent - 10) : __builtin_ldexpf(mantissa, -9);
  if ((code & 0x7F) == 0x7F) size = __builtin_nanf("");
  return code & 0x80 ? -size : size;
}
static float numbers[256];

static void read_row(float* to, unsigned block, u32 from) {
  for (u32 chunk = 0; chunk < 32; chunk += 16) {
    const char* codes = at_address(block, swizzled(from + chunk, true), 16);
    for (u32 k = 0; k < 16; k++) to[chunk + k] = numbers[(u8)codes[k]];
  }
}

INLINE void products_begin() {}
INLINE void products_end() {
  now->groups.push_back(now->products.size());
  if (!lazy) {
    for (auto& product : now->products) product();
    now->products.clear();
    now->groups.back() = 0;
  }
}
template <int COUNT> INLINE void multiply_fp8(float (&d)[COUNT], u32 a, u32 b, int add) {
  float* made = d;
  unsigned block = now->block, thread = threadIdx.x % 128;
  now->products.push_back([=] {
    unsigned row = thread / 32 * 16 + thread % 32 / 4;
    float left[2][32], right[32];
    read_row(left[0], block, a * 16 + row * 128), read_row(left[1], block, a * 16 + (row + 8) * 128);
    for (int i = 0; i < COUNT; i++) {
      read_row(right, block, b * 16 + (8 * (i / 4) + 2 * (thread % 4) + i % 2) * 128);
      float sum = 0.0f;
      for (int k = 0; k < 32; k++) sum += left[i / 2 % 2][k] * right[k];
      made[i] = add ? made[i] + sum : sum;
    }
  });
}
template <int LEFT, int COUNT> INLINE void products_wait(float (&)[COUNT]) {
  if (now->groups.size() <= LEFT) return;
  size_t until = now->groups[now->groups.size() - LEFT - 1];
  for (size_t at = 0; at < until; at++) now->products[at]();
  now->products.erase(now->products.begin(), now->products.begin() + until);
  now->groups.erase(now->groups.begin(), now->groups.end() - LEFT);
  for (size_t& end : now->groups) end -= min(end, until);
  wait_until([] { return true; });
}
INLINE u32 operand_along(u32 address) { return address >> 4; }

TEST_PLACES
INLINE void store_operand(const u32* x, u32 tile, int row, int step) {
  unsigned lane = threadIdx.x % 32;
  for (unsigned of = 0; of < 4; of++) {
    unsigned from = 8 * of + lane / 4;
    u32 at = place_in_tile(tile, row + from % 16, 2 * step + from / 16);
    memcpy(at_address(now->block, at + lane % 4 * 4, 4), &x[of], 4);
  }
}

// --- launches

static std::function<void()> body;
static void begin() {
  body();
  now->ended = true;
  if (!now->products.empty()) failed("products that were not waited for");
  if (now->arrived_in) failed("an arrival in a cluster that is not waited for");
  store_all(*now);
  blocks[now->block].running--;
  go_on(now->stack, scheduler);
}

static std::string launched(unsigned clusters, unsigned cluster, unsigned threads, unsigned shared_bytes, u64 seed) {
  static std::vector<char*> stacks;
  for (int code = 0; code < 256; code++) numbers[code] = of_e4m3(code);
  fault.clear();
  random_state = seed * 7919 + 1, lazy = seed % 3 != 0;
  blockDim = {threads}, gridDim = {clusters * cluster};
  emulated_cluster = cluster;
  for (unsigned of = 0; of < clusters && fault.empty(); of++) {
    fibers = std::vector<Fiber>(cluster * threads);
    blocks = std::vector<Block>(cluster);
    copies.clear();
    cluster_met = cluster_round = barriers_at = 0;
    while (stacks.size() < fibers.size())
      stacks.push_back((char*)mmap(nullptr, 1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    for (Block& block : blocks) block.memory.assign(shared_bytes, 0x7F), block.running = threads;
    for (unsigned at = 0; at < fibers.size(); at++) {
      Fiber& fiber = fibers[at];
      fiber.block = at / threads, fiber.thread = at % threads, fiber.ended = false;
      fiber.ready = [] { return true; };
      begin_on(fiber.stack, stacks[at], 1 << 16, begin);
    }
    unsigned left = fibers.size(), favoured = 0;
    while (left && fault.empty()) {
      bool idle = true;
      if (!drawn(64)) favoured = drawn(fibers.size());
      unsigned start = drawn(3) ? favoured : drawn(fibers.size());
      for (unsigned step = 0; step < fibers.size(); step++) {
        Fiber& fiber = fibers[(start + step) % fibers.size()];
        if (fiber.ended || !fiber.ready()) continue;
        idle = false;
        now = &fiber;
        threadIdx = {fiber.thread}, blockIdx = {of * cluster + fiber.block}, emulated_rank = fiber.block;
        go_on(scheduler, fiber.stack);
        left -= fiber.ended;
        break;
      }
      if (!copies.empty() && (idle || !drawn(300))) {
        unsigned at = drawn(copies.size());
        Copy copy = copies[at];
        copies.erase(copies.begin() + at);
        copy.run();
      } else if (idle) {
        failed("no thread can go on");
      }
    }
    if (fault.empty() && !copies.empty()) failed("copies that nothing waits for");
    for (Block& block : blocks)
      for (Named& named : block.named)
        if (named.arrived && fault.empty()) failed("an arrival that nothing waits for");
  }
  return fault;
}
