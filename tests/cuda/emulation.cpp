// The fibers of `emulation.h`. One block runs at a time; shared memory is static, so that it keeps what the block before
// left in it, as that of a GPU does.
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

struct Dim {
  unsigned x;
};
extern "C" {
Dim threadIdx, blockIdx, blockDim, gridDim;
}

namespace {
constexpr unsigned WARP = 32, MOST = 1024, STACK = 1 << 16, NOBODY = 0x7FC0DEAD;  // a NaN
enum State { READY, AT_SHUFFLE, AT_BARRIER, DONE };
enum Fault { NONE = 0, DIVERGED = 1, TOO_MANY_THREADS = 2, NO_MEMORY = 3 };

struct Fiber {
  ucontext_t context;
  State state;
  unsigned box, from;
};
Fiber fibers[MOST];
ucontext_t scheduler;
char* stacks;
unsigned current;
void (*body)(const void*);
const void* parameters;

void enter() {
  body(parameters);
  fibers[current].state = DONE;
  swapcontext(&fibers[current].context, &scheduler);
}

void wait(State at) {
  fibers[current].state = at;
  swapcontext(&fibers[current].context, &scheduler);
}

void resume(unsigned thread) {
  current = thread;
  threadIdx.x = thread;
  fibers[thread].state = READY;
  swapcontext(&scheduler, &fibers[thread].context);
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
    if (waiting + count(begin, end, DONE) != end - begin) return DIVERGED;
    unsigned boxes[WARP];
    for (unsigned i = begin; i < begin + WARP; i++)
      boxes[i - begin] = i < end && fibers[i].state == AT_SHUFFLE ? fibers[i].box : NOBODY;
    for (unsigned i = begin; i < end; i++)
      if (fibers[i].state == AT_SHUFFLE) fibers[i].box = boxes[fibers[i].from];
    resume_all(begin, end, AT_SHUFFLE, backwards);
  }
  return NONE;
}

Fault run_block(unsigned threads, bool backwards) {
  for (unsigned i = 0; i < threads; i++) {
    getcontext(&fibers[i].context);
    fibers[i].context.uc_stack.ss_sp = stacks + (size_t)i * STACK;
    fibers[i].context.uc_stack.ss_size = STACK;
    fibers[i].context.uc_link = &scheduler;
    makecontext(&fibers[i].context, enter, 0);
    fibers[i].state = READY;
  }
  // Whole warps one after the other, as far as each comes without the others.
  for (;;) {
    for (unsigned warp = 0; warp * WARP < threads; warp++) {
      unsigned warps = (threads + WARP - 1) / WARP, begin = (backwards ? warps - 1 - warp : warp) * WARP;
      unsigned end = begin + WARP < threads ? begin + WARP : threads;
      resume_all(begin, end, READY, backwards);
      if (Fault fault = shuffle(begin, end, backwards)) return fault;
    }
    unsigned waiting = count(0, threads, AT_BARRIER), ended = count(0, threads, DONE);
    if (ended == threads) return NONE;
    if (waiting + ended != threads || ended) return DIVERGED;  // a barrier is for all threads of the block
    for (unsigned i = 0; i < threads; i++) fibers[i].state = READY;
  }
}
}  // namespace

extern "C" void __syncthreads() { wait(AT_BARRIER); }

extern "C" unsigned emulated_exchange(unsigned value, unsigned lane) {
  fibers[current].box = value;
  fibers[current].from = lane;
  unsigned me = current;
  wait(AT_SHUFFLE);
  return fibers[me].box;
}

extern "C" int emulated_launch(
    void (*kernel)(const void*), const void* given, unsigned blocks, unsigned threads, int backwards) {
  if (threads > MOST) return TOO_MANY_THREADS;
  if (!stacks && !(stacks = (char*)malloc((size_t)MOST * STACK))) return NO_MEMORY;
  body = kernel;
  parameters = given;
  gridDim.x = blocks;
  blockDim.x = threads;
  for (unsigned block = 0; block < blocks; block++) {
    blockIdx.x = backwards ? blocks - 1 - block : block;
    if (Fault fault = run_block(threads, backwards)) return fault;
  }
  return NONE;
}
