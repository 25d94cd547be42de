// Running a loop on torch's own threads.
//
// A second pool would compete with torch's, whose threads spin for a while after each of torch's loops. torch loads its
// OpenMP runtime where every library sees it, and all of them have GOMP_parallel; where none does, threads are started.
#pragma once

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

// OpenMP's threads do not exist in a forked child, where its next loop would wait for them forever.
namespace {
std::atomic<bool> forked{false};
const int WATCHED = pthread_atfork(nullptr, nullptr, [] { forked = true; });
}  // namespace

template <class Body>
struct Loop {
    const Body &body;
    int64_t count;
    std::atomic<int64_t> next{0};

    static void work(void *self) {
        Loop &loop = *static_cast<Loop *>(self);
        for (int64_t i; (i = loop.next.fetch_add(1)) < loop.count;) loop.body(i);
    }
};

// body(i) for each i below count, in any order, on so many threads.
template <class Body>
void parallel_for(int64_t count, int threads, const Body &body) {
    using Parallel = void (*)(void (*)(void *), void *, unsigned, unsigned);
    static const Parallel shared = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    Loop<Body> loop{body, count};
    if (threads > count) threads = static_cast<int>(count);
    if (threads <= 1) {
        Loop<Body>::work(&loop);
    } else if (shared && WATCHED == 0 && !forked) {
        shared(&Loop<Body>::work, &loop, static_cast<unsigned>(threads), 0);
    } else {
        std::vector<std::thread> others;
        for (int t = 1; t < threads; t++) others.emplace_back(&Loop<Body>::work, &loop);
        Loop<Body>::work(&loop);
        for (auto &other : others) other.join();
    }
}
