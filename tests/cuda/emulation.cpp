// The fibers of `emulation.h`. One block, or the blocks of one cluster, run at a time; each goes on until it has to wait
// for others. Shared memory is static, so that it keeps what the block before left in it, as that of a GPU does.
#include "fibers.h"
#include <stdlib.h>
#include <string.h>

struct Dim {
  unsigned x;
};
extern "C" {
Dim threadIdx, blockIdx, blockDim, gridDim;
unsigned emulated_rank, emulated_cluster;
}

namespace {
constexpr unsigned WARP = 32, MOST = 1024, CLUSTER = 8, STACK = 1 << 16, WORDS = 8, NOBODY = 0x7FC0DEAD;  // a NaN
enum State { READY, AT_SHUFFLE, AT_BARRIER, AT_CLUSTER, DONE };
enum Fault { NONE = 0, DIVERGED = 1, TOO_MANY_THREADS = 2, NO_MEMORY = 3, NO_END = 4 };
constexpr unsigned PATIENCE = 1 << 12;  // turns of a block in which nothing but waiting goes on

struct Fiber {
  Stack stack;
  State state;
  unsigned box, from;
  const unsigned* words;  // what it gives beside its box, if it does
  unsigned num_words;
};
Fiber fibers[CLUSTER * MOST];  // block after block
Stack scheduler;
unsigned given_words[CLUSTER * MOST + WARP][WORDS];  // by each thread at its last meeting
char* stacks;
unsigned current, first_block, advances;  // how often a thread found what it waited for
void (*body)(const void*);
const void* parameters;

void enter() {
  for (;;) {  // in each block after the first
    body(parameters);
    fibers[current].state = DONE;
    go_on(fibers[current].stack, scheduler);
  }
}

void wait(State at) {
  fibers[current].state = at;
  go_on(fibers[current].stack, scheduler);
}

void resume(unsigned fiber) {
  current = fiber;
  emulated_rank = fiber / blockDim.x;
  threadIdx.x = fiber % blockDim.x;
  blockIdx.x = first_block + emulated_rank;
  fibers[fiber].state = READY;
  go_on(scheduler, fibers[fiber].stack);
}

// Lets every fiber of one state run to its next stop, in one order or the other.
void resume_all(unsigned begin, unsigned end, State of, bool backwards) {
  for (unsigned i = begin; i < end; i++) {
    unsigned thread = backwards ? begin + end - 1 - i : i;
    if (fibers[thread].state == of) resume(thread);
  }
}

unsigned count(unsigned begin, unsigned end, State state) {
  unsigned found = 0;
  for (unsigned i = begin; i < end; i++) found += fibers[i].state == state;
  return found;
}

// Shuffles of a warp until none waits for one: all its lanes that have not ended must be there.
Fault shuffle(unsigned begin, unsigned end, bool backwards) {
  while (unsigned waiting = count(begin, end, AT_SHUFFLE)) {
    if (waiting + count(begin, end, DONE) != end - begin) return count(begin, end, READY) ? NONE : DIVERGED;
    unsigned boxes[WARP];
    for (unsigned i = begin; i < begin + WARP; i++)
      boxes[i - begin] = i < end && fibers[i].state == AT_SHUFFLE ? fibers[i].box : NOBODY;
    for (unsigned i = begin; i < begin + WARP; i++) {
      bool gives = i < end && fibers[i].state == AT_SHUFFLE;
      for (unsigned at = 0; at < WORDS; at++)
        given_words[i][at] = gives && at < fibers[i].num_words ? fibers[i].words[at] : NOBODY;
    }
    for (unsigned i = begin; i < end; i++)
      if (fibers[i].state == AT_SHUFFLE) fibers[i].box = boxes[fibers[i].from];
    resume_all(begin, end, AT_SHUFFLE, backwards);
  }
  return NONE;
}

// A block until all its threads wait for other blocks, or have ended. Whole warps go one after the other, as far as each
// comes without the others.
Fault run_block(unsigned first, unsigned threads, bool backwards) {
  unsigned warps = (threads + WARP - 1) / WARP, before = advances, idle = 0;
  for (;;) {
    for (unsigned warp = 0; warp < warps; warp++) {
      unsigned begin = first + (backwards ? warps - 1 - warp : warp) * WARP;
      unsigned end = begin + WARP < first + threads ? begin + WARP : first + threads;
      resume_all(begin, end, READY, backwards);
      if (Fault fault = shuffle(begin, end, backwards)) return fault;
    }
    if (count(first, first + threads, READY) || count(first, first + threads, AT_SHUFFLE)) {  // some ask again
      idle = advances == before ? idle + 1 : 0;
      before = advances;
      if (idle > PATIENCE) return NO_END;
      continue;
    }
    unsigned waiting = count(first, first + threads, AT_BARRIER);
    if (!waiting) return NONE;
    if (waiting != threads) return DIVERGED;  // a barrier is for all threads of the block
    for (unsigned i = first; i < first + threads; i++) fibers[i].state = READY;
  }
}

Fault run_cluster(unsigned blocks, unsigned threads, bool backwards) {
  for (unsigned i = 0; i < blocks * threads; i++) {
    if (fibers[i].state != DONE) begin_on(fibers[i].stack, stacks + (size_t)i * STACK, STACK, enter);
    fibers[i].state = READY;
    fibers[i].num_words = fibers[i].from = 0;
  }
  for (;;) {
    for (unsigned block = 0; block < blocks; block++) {
      if (Fault fault = run_block((backwards ? blocks - 1 - block : block) * threads, threads, backwards)) return fault;
    }
    if (count(0, blocks * threads, DONE) == blocks * threads) return NONE;
    if (count(0, blocks * threads, AT_CLUSTER) != blocks * threads) return DIVERGED;
    for (unsigned i = 0; i < blocks * threads; i++) fibers[i].state = READY;
  }
}
}  // namespace

extern "C" void __syncthreads() { wait(AT_BARRIER); }

extern "C" void sync_cluster() { wait(AT_CLUSTER); }

// For a thread that asks again and again for something: the others go on meanwhile.
extern "C" void emulated_yield() { wait(READY); }
extern "C" void emulated_found() { advances++; }

extern "C" const unsigned (*emulated_meet(const unsigned* words, unsigned num))[WORDS] {
  fibers[current].words = words;
  fibers[current].num_words = num;
  unsigned me = current;
  wait(AT_SHUFFLE);
  fibers[me].num_words = 0;
  return given_words + (me - threadIdx.x % WARP);
}

extern "C" unsigned emulated_exchange(unsigned value, unsigned lane) {
  fibers[current].box = value;
  fibers[current].from = lane;
  unsigned me = current;
  wait(AT_SHUFFLE);
  return fibers[me].box;
}

extern "C" int emulated_launch(
    void (*kernel)(const void*), const void* given, unsigned cluster, unsigned clusters, unsigned threads, int backwards) {
  if (threads > MOST || cluster > CLUSTER) return TOO_MANY_THREADS;
  if (!stacks && !(stacks = (char*)malloc((size_t)CLUSTER * MOST * STACK))) return NO_MEMORY;
  body = kernel;
  parameters = given;
  gridDim.x = clusters * cluster;
  blockDim.x = threads;
  emulated_cluster = cluster;
  for (unsigned at = 0; at < clusters; at++) {
    first_block = (backwards ? clusters - 1 - at : at) * cluster;
    if (Fault fault = run_cluster(cluster, threads, backwards)) return fault;
  }
  return NONE;
}
