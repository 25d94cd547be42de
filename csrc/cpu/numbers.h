// Numbers of 8, 16 and 32 bits, one at a time; memory of a thread and of a call.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

// Of several objects in one library, each compiled for other instructions, names end differently.
#if defined(KERNELHUB_SUFFIX)
#define KERNELHUB_JOINED(name, suffix) kernelhub_##name##_##suffix
#define KERNELHUB_JOIN(name, suffix) KERNELHUB_JOINED(name, suffix)
#define KERNELHUB(name) KERNELHUB_JOIN(name, KERNELHUB_SUFFIX)
#else
#define KERNELHUB(name) kernelhub_##name
#endif

namespace {

enum Kind : int64_t { BFLOAT16, FLOAT16, FLOAT32, FLOAT8_E4M3, FLOAT8_E5M2 };

inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline float of_half(uint16_t held) {
    const uint32_t size = held & 0x7fff, sign = static_cast<uint32_t>(held & 0x8000) << 16;
    const float finite = float_of(size << 13) * 0x1p112f;
    const uint32_t special = (size << 13) | 0x7f800000;
    return float_of((size >= 0x7c00 ? special : bits_of(finite)) | sign);
}

inline uint16_t rounded_to_bfloat16(float value) {
    const uint32_t bits = bits_of(value), up = bits + 0x7fff + ((bits >> 16) & 1);
    return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : up >> 16);
}

inline uint16_t rounded_to_half(float value) {
    const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
    uint32_t half;
    if (size > 0x7f800000) {
        half = 0x7e00;
    } else if (size >= 0x477ff000) {  // 65520 and more round to infinity
        half = 0x7c00;
    } else if (size < 0x38800000) {  // below 2^-14 the step is 2^-24: adding 1/2 leaves those bits at the end
        half = bits_of(float_of(size) + 0.5f) - 0x3f000000;
    } else {
        half = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
    }
    return static_cast<uint16_t>(sign | half);
}

template <Kind KIND>
struct Number;
template <>
struct Number<FLOAT32> {
    typedef float Held;
    static float value(float held) { return held; }
    static float held(float value) { return value; }
};
template <>
struct Number<BFLOAT16> {
    typedef uint16_t Held;
    static float value(uint16_t held) { return float_of(static_cast<uint32_t>(held) << 16); }
    static uint16_t held(float value) { return rounded_to_bfloat16(value); }
};
template <>
struct Number<FLOAT16> {
    typedef uint16_t Held;
    static float value(uint16_t held) { return of_half(held); }
    static uint16_t held(float value) { return rounded_to_half(value); }
};

// A function of the type of numbers that is told at run time.
template <class Function>
void with(int64_t kind, const Function &function) {
    if (kind == BFLOAT16) function(Number<BFLOAT16>());
    else if (kind == FLOAT16) function(Number<FLOAT16>());
    else function(Number<FLOAT32>());
}

// Memory that is kept for the next request of its owner.
struct Buffer {
    void *memory = nullptr;
    size_t size = 0;

    Buffer() = default;
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    ~Buffer() { free(memory); }

    template <class T>
    T *take(size_t count) {
        const size_t wanted = (count * sizeof(T) + 63) / 64 * 64;
        if (wanted > size) {
            free(memory);
            memory = aligned_alloc(64, wanted);
            if (!memory) abort();
            size = wanted;
        }
        return static_cast<T *>(memory);
    }
};

// As std::vector, of which objects compiled for other instructions would share functions.
template <class T>
struct List {
    T *items = nullptr;
    int64_t count = 0, room = 0;

    List() = default;
    List(const List &) = delete;
    List &operator=(const List &) = delete;
    ~List() { free(items); }

    void add(const T &item) {
        if (count == room) {
            room = room ? 2 * room : 64;
            T *more = static_cast<T *>(realloc(items, room * sizeof(T)));
            if (!more) abort();
            items = more;
        }
        items[count++] = item;
    }
    T &operator[](int64_t i) { return items[i]; }
    const T &operator[](int64_t i) const { return items[i]; }
    const T *begin() const { return items; }
};

}  // namespace
