// Blocks of a cluster (sm_90 and later), which run at the same time and reach each other's shared memory.
//
// A kernel whose blocks are no cluster has one block in each, and pays nothing for it.
#pragma once
#include "formats.h"

#ifndef KERNELHUB_EMULATED
#define SHARED_BY_CLUSTER(Type, name) __shared__ Type name

#if __CUDA_ARCH__ >= 900
#define HAS_CLUSTERS 1
INLINE u32 rank_in_cluster() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
INLINE u32 blocks_of_cluster() {
  u32 blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}
// All threads of all blocks: what they wrote to any block's shared memory is seen by all.
INLINE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same in two steps, between which a thread does something else.
INLINE void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
INLINE void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The same shared variable in the block of that rank.
template <typename T> INLINE T& in_block(T& mine, u32 rank) {
  u64 there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"((u64)&mine), "r"(rank));
  return *(T*)there;
}
#else
#define HAS_CLUSTERS 0
#endif
#endif
