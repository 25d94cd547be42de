// A product of float8 matrices on a CPU: both sides are codes, activations are decoded once beforehand.

#include "product.h"

namespace {

void run(Call call) {
    Element *left = static_cast<Element *>(call.work);
    const int64_t padded = call.padded();
    constexpr int64_t ROWS = 8;
    parallel_for((call.m + ROWS - 1) / ROWS, call.threads, [&](int64_t chunk) {
        for (int64_t i = chunk * ROWS; i < (chunk + 1) * ROWS && i < call.m; i++)
            decode_row(call.a + i * call.stride_am, call.k, left + i * padded);
    });
    const int64_t tasks = divide(call, 1);
    parallel_for(tasks, call.threads, [&](int64_t task) { perform<E4M3>(call, left, task); });
}

}  // namespace

extern "C" {

// Bytes of an element of the memory that a call works in, which is rows x (columns, made a multiple of 32) of them.
int64_t kernelhub_fp8_gemm_element_bytes() { return sizeof(Element); }

// Bytes that a code stands for, decoded as the kernel does: for tests.
void kernelhub_fp8_decode(const uint8_t *codes, int64_t count, void *into) {
    decode_row(codes, count, static_cast<Element *>(into));
}

void kernelhub_fp8_gemm(const uint8_t *a, const uint8_t *b, const void *a_scale, const void *b_scale, const float *bias,
                        void *out, void *work, const int64_t *sizes, int64_t threads) {
    const int64_t *s = sizes;
    const Scale of_a{a_scale, s[5], s[6], s[7]}, of_b{b_scale, s[8], s[9], s[10]};
    const Call call{a,
                    b,
                    of_a,
                    of_b,
                    bias,
                    out,
                    work,
                    s[0],
                    s[1],
                    s[2],
                    s[3],
                    s[4],
                    s[11],
                    s[12],
                    s[13],
                    s[14],
                    static_cast<int>(threads)};
    run(call);
}

// The same for each of s[0] matrices; s[1], s[2] and s[3] are the strides between those of a, b and out, s[4] and s[5]
// between scales. Each is the work of one thread, unless there are fewer of them than threads.
void kernelhub_bmm_fp8(const uint8_t *a, const uint8_t *b, const float *a_scale, const float *b_scale, void *out, void *work,
                       const int64_t *sizes, int64_t threads) {
    const int64_t *s = sizes;
    const int64_t batch = s[0], m = s[6], n = s[7], k = s[8], kind = s[12], width = kind == FLOAT32 ? 4 : 2;
    const bool each = batch >= threads;
    const int64_t padded = (k + 31) / 32 * 32;
    const auto call_of = [&](int64_t i) {
        const Scale of_a{a_scale + i * s[4], 0, 0, 0}, of_b{b_scale + i * s[5], 0, 0, 0};
        return Call{a + i * s[1],
                    b + i * s[2],
                    of_a,
                    of_b,
                    nullptr,
                    static_cast<char *>(out) + i * s[3] * width,
                    static_cast<Element *>(work) + i * m * padded,
                    m,
                    n,
                    k,
                    k,
                    1,
                    s[9],
                    s[10],
                    s[11],
                    kind,
                    each ? 1 : static_cast<int>(threads)};
    };
    const auto one = [&](int64_t i) {
        Call call = call_of(i);
        const int64_t later = i + (each ? threads : 1);
        const Call after = call_of(later < batch ? later : i);
        if (later < batch) call.after = &after;
        run(call);
    };
    if (each) {
        parallel_for(batch, static_cast<int>(threads), one);
    } else {
        for (int64_t i = 0; i < batch; i++) one(i);
    }
}
}
