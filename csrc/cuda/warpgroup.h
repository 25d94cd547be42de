// Matrix products of a warpgroup (wgmma), copies by TMA and barriers in shared memory, for sm_90a.
//
// Tiles have 128 bytes a row and the 128-byte swizzle: eight rows are an atom of 1024 bytes. A product of 64 x N
// numbers has steps of 32 bytes, 16 of bfloat16 or 32 of float8; its sums are in registers, N / 2 of a thread: of row 16
// warp + lane / 4 + 8 (i / 2 % 2) and column 8 (i / 4) + 2 (lane % 4) + i % 2.
#pragma once
#include "formats.h"

struct alignas(64) TensorMap {
  char bytes[128];
};

// Where the driver's encoding of a tensor comes with its sizes and strides, which a kernel does not need.
#define TENSOR_MAP(name) \
  const __grid_constant__ TensorMap name, int name##_rows, int name##_columns, i64 name##_stride, i64 name##_one

INLINE u32 shared_address(const void* of) { return (u32)__cvta_generic_to_shared(of); }

// --- barriers

INLINE void barrier_begin(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(arrivals) : "memory");
}
INLINE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(bar) : "memory"); }
INLINE void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(bar), "r"(bytes) : "memory");
}
INLINE void barrier_wait(u32 bar, u32 phase) {
  asm volatile(
      "{\n\t.reg .pred done;\n\tagain:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@done bra passed;\n\tbra again;\n\tpassed:\n\t}"
      :
      : "r"(bar), "r"(phase)
      : "memory");
}
// One arrival of a warp, after what all of its lanes did.
INLINE void barrier_arrive_warp(u32 bar) {
  __syncwarp();
  if (threadIdx.x % WARP == 0) barrier_arrive(bar);
}
// The same where other blocks of the cluster sent what is waited for.
INLINE void barrier_wait_for_cluster(u32 bar, u32 phase) {
  asm volatile(
      "{\n\t.reg .pred done;\n\tagain:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t"
      "@done bra passed;\n\tbra again;\n\tpassed:\n\t}"
      :
      : "r"(bar), "r"(phase)
      : "memory");
}
// An arrival at the barrier in the same place of another block of the cluster, or of this one.
INLINE void barrier_arrive_in(u32 bar, u32 rank) {
  asm volatile(
      "{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\t"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t}"
      :
      : "r"(bar), "r"(rank)
      : "memory");
}
// What this thread wrote to shared memory is seen by products and by TMA.
INLINE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
// Barriers that were begun are seen by TMA.
INLINE void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }
template <int THREADS> INLINE void sync_threads_of(int number) {
  asm volatile("bar.sync %0, %1;" : : "r"(number), "n"(THREADS) : "memory");
}

// --- copies

INLINE void tma_load(u32 to, const TensorMap* map, int column, int row, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               :
               : "r"(to), "l"(map), "r"(bar), "r"(column), "r"(row)
               : "memory");
}
// The same of what is read once: L2 gives it up before other things.
INLINE void tma_load_once(u32 to, const TensorMap* map, int column, int row, u32 bar) {
  asm volatile(
      "{\n\t.reg .b64 policy;\n\tcreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n\t"
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], policy;\n\t}"
      :
      : "r"(to), "l"(map), "r"(bar), "r"(column), "r"(row)
      : "memory");
}
// To the same place in the blocks of a cluster whose bits are set; each has an arrival of the bytes at its own barrier.
INLINE void tma_load_all(u32 to, const TensorMap* map, int column, int row, u32 bar, u16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;"
      :
      : "r"(to), "l"(map), "r"(bar), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}
INLINE void tma_store(u32 from, const TensorMap* map, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
               :
               : "l"(map), "r"(from), "r"(column), "r"(row)
               : "memory");
}
INLINE void tma_stores_end() { asm volatile("cp.async.bulk.commit_group;" : : : "memory"); }
// Until what this thread stored has been read from shared memory, or is written.
INLINE void tma_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" : : : "memory"); }
INLINE void tma_stores_done() { asm volatile("cp.async.bulk.wait_group 0;" : : : "memory"); }
INLINE void tma_prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory"); }
INLINE void prefetch_line(const char* at) { asm volatile("prefetch.global.L2 [%0];" : : "l"(at)); }

// The address of the same place in another block of the cluster.
INLINE u32 address_in(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Four numbers into shared memory of a block of the cluster, whose barrier has an arrival of 16 bytes.
INLINE void send_floats(u32 to, const float* x, u32 bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               :
               : "r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(bar)
               : "memory");
}

// --- registers of a warpgroup

template <int COUNT> INLINE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(COUNT)); }
template <int COUNT> INLINE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(COUNT)); }

// --- products

// An operand whose rows are 64 elements along the dimension that is summed over; 16 elements on are 2 more.
INLINE u32 operand_along(u32 address) { return address >> 4; }
// One whose rows lie across it, tiles of 64 columns 8192 bytes apart; 16 rows on are 128 more.
INLINE u32 operand_across(u32 address) { return (address >> 4) + (512u << 16); }

// The same number, which the compiler does not know to be so: what is made of it is not kept in registers from one use to
// the next, of which there are too few for the operands of all products of a loop.
INLINE u32 afresh(u32 x) {
  u32 made;
  asm volatile("mov.b32 %0, %1;" : "=r"(made) : "r"(x));
  return made;
}

INLINE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
INLINE void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }

// The registers of a result: as operands of an instruction, and in its text, where they come first.
#define FLOATS_8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLOATS_32(d, i) FLOATS_8(d, i), FLOATS_8(d, i + 8), FLOATS_8(d, i + 16), FLOATS_8(d, i + 24)
#define FLOATS_64(d, i) FLOATS_32(d, i), FLOATS_32(d, i + 32)
#define FLOATS_128(d) FLOATS_64(d, 0), FLOATS_64(d, 64)
#define TEXT_32                                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TEXT_64                                                                      \
  TEXT_32                                                                            \
  ", "                                                                               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TEXT_128                                                                                 \
  TEXT_64                                                                                        \
  ", "                                                                                           \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// d (+)= a b of 64 x 64 numbers, both in shared memory along what is summed over.
INLINE void multiply_64(float (&d)[32], u32 a, u32 b, int add) {
  asm volatile(
      "{\n\t.reg .pred more;\n\t.reg .b64 a, b;\n\tsetp.ne.b32 more, %34, 0;\n\t"
      "mov.b64 a, {%32, 0x40000040};\n\tmov.b64 b, {%33, 0x40000040};\n\t"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{" TEXT_32
      "}, "
      "a, b, more, 1, 1, 0, 0;\n\t}"
      : FLOATS_32(d, 0)
      : "r"(a), "r"(b), "r"(add));
}
// The same with a in registers.
INLINE void multiply_64(float (&d)[32], const u32* a, u32 b) {
  asm volatile(
      "{\n\t.reg .b64 b;\n\tmov.b64 b, {%36, 0x40000040};\n\t"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{" TEXT_32
      "}, "
      "{%32, %33, %34, %35}, b, 1, 1, 1, 0;\n\t}"
      : FLOATS_32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
// d += a b of 64 x 256 numbers, b in shared memory across.
INLINE void multiply_256(float (&d)[128], u32 a, u32 b) {
  asm volatile(
      "{\n\t.reg .pred more;\n\t.reg .b64 a, b;\n\tsetp.ne.b32 more, %130, 0;\n\t"
      "mov.b64 a, {%128, 0x40000040};\n\tmov.b64 b, {%129, 0x40000040};\n\t"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{" TEXT_128
      "}, "
      "a, b, more, 1, 1, 0, 1;\n\t}"
      : FLOATS_128(d)
      : "r"(a), "r"(b), "r"(1));
}
INLINE void multiply_256(float (&d)[128], const u32* a, u32 b) {
  asm volatile(
      "{\n\t.reg .b64 b;\n\tmov.b64 b, {%132, 0x40000040};\n\t"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{" TEXT_128
      "}, "
      "{%128, %129, %130, %131}, b, 1, 1, 1, 1;\n\t}"
      : FLOATS_128(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}

// d (+)= a b of 64 x 64 numbers of float8 (e4m3), both in shared memory along what is summed over.
INLINE void multiply_fp8(float (&d)[32], u32 a, u32 b, int add) {
  asm volatile(
      "{\n\t.reg .pred more;\n\t.reg .b64 a, b;\n\tsetp.ne.b32 more, %34, 0;\n\t"
      "mov.b64 a, {%32, 0x40000040};\n\tmov.b64 b, {%33, 0x40000040};\n\t"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{" TEXT_32
      "}, "
      "a, b, more, 1, 1;\n\t}"
      : FLOATS_32(d, 0)
      : "r"(a), "r"(b), "r"(add));
}
// d (+)= a b of 64 x 128 numbers of float8 (e4m3), both in shared memory along what is summed over.
INLINE void multiply_fp8(float (&d)[64], u32 a, u32 b, int add) {
  asm volatile(
      "{\n\t.reg .pred more;\n\t.reg .b64 a, b;\n\tsetp.ne.b32 more, %66, 0;\n\t"
      "mov.b64 a, {%64, 0x40000040};\n\tmov.b64 b, {%65, 0x40000040};\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{" TEXT_64
      "}, "
      "a, b, more, 1, 1;\n\t}"
      : FLOATS_64(d, 0)
      : "r"(a), "r"(b), "r"(add));
}

// Until at most LEFT groups of products are under way. What is passed is not touched before.
template <int LEFT> INLINE void products_wait(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : FLOATS_32(d, 0) : "n"(LEFT) : "memory");
}
template <int LEFT> INLINE void products_wait(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : FLOATS_64(d, 0) : "n"(LEFT) : "memory");
}
template <int LEFT> INLINE void products_wait(float (&d)[128]) {
  asm volatile("wgmma.wait_group.sync.aligned %128;" : FLOATS_128(d) : "n"(LEFT) : "memory");
}
// The registers of an operand live until here.
template <int COUNT> INLINE void keep(u32 (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(x[i]));
}
INLINE void keep(float& x) { asm volatile("" : "+f"(x)); }

// Between -most and most; NaN stays NaN.
INLINE float within(float x, float most) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(most));
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-most));
  return x;
}

// --- tiles in shared memory

INLINE float load_shared(u32 from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}

INLINE void load_shared_vector(float (&x)[4], u32 from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(from)
               : "memory");
}

// The address of 16 bytes: of elements from 8 chunk on of a row.
INLINE u32 place_in_tile(u32 tile, int row, int chunk) { return tile + row * 128 + ((chunk ^ (row & 7)) << 4); }

// 16 x 16 numbers of a warp between registers, as an operand has them, and a tile: rows from `row`, columns 16 step.
INLINE void load_operand(u32 (&x)[4], u32 tile, int row, int step) {
  int lane = threadIdx.x % WARP;
  u32 at = place_in_tile(tile, row + lane % 16, 2 * step + lane / 16);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}
INLINE void store_operand(const u32* x, u32 tile, int row, int step) {
  int lane = threadIdx.x % WARP;
  u32 at = place_in_tile(tile, row + lane % 16, 2 * step + lane / 16);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
