// Runs the kernels of a library of csrc/cpu, without Python: driver LIBRARY... [loads each in turn, all of which together
// have every function]. A line for each case: its largest error as a share of what is allowed, and a digest of its bits.
// The exit status is 1 if a result is wrong, or one of three threads is not that of one.

#include <dlfcn.h>

#include <algorithm>
#include <thread>

#include "attention.h"
#include "products.h"
#include "routing.h"

namespace {

std::vector<void *> libraries;

template <class Function>
Function find(const char *name) {
    for (void *library : libraries)
        if (void *found = dlsym(library, name)) return reinterpret_cast<Function>(found);
    printf("no library has %s\n", name);
    exit(2);
}

// Of one thread and of three, each in a thread whose buffers are new.
template <class Body>
bool tell(const std::string &name, const Body &body) {
    Report reports[2];
    for (int several = 0; several < 2; several++) {
        reports[several].name = name, reports[several].compared = !several;
        std::thread([&] { body(several ? 3 : 1, reports[several]); }).join();
    }
    const bool same = reports[0].digest == reports[1].digest, ok = same && !reports[0].wrong && !reports[1].wrong;
    printf("%-4s %016llx %.3f %s%s\n", ok ? "ok" : "BAD", static_cast<unsigned long long>(reports[0].digest),
           reports[0].worst, name.c_str(), same ? "" : " (three threads differ)");
    fflush(stdout);
    return ok;
}

void decodes(Report &report, ElementBytes element_bytes) {
    const auto decode = find<void (*)(const uint8_t *, int64_t, void *)>("kernelhub_fp8_decode");
    const int64_t kind = element_bytes() == 2 ? BFLOAT16 : FLOAT32;
    for (int64_t count : {256, 1, 31, 33, 100}) {
        Memory<uint8_t> codes(count, 1);
        for (int64_t i = 0; i < count; i++) codes[i] = static_cast<uint8_t>(255 - i);
        Memory<char> into(up_to(count, 32) * element_bytes());
        decode(codes.data, count, into.data);
        for (int64_t i = 0; i < up_to(count, 32); i++) {
            const double got = value_of(kind, into.data + i * element_bytes());
            const double want = i < count ? value_of(FLOAT8_E4M3, &codes[i]) : 0.0;
            report.require(got == want || (std::isnan(got) && std::isnan(want)), "a code is decoded wrongly");
        }
    }
}

}  // namespace

int main(int count, char **names) {
    for (int i = 1; i < count; i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            printf("%s\n", dlerror());
            return 2;
        }
        libraries.push_back(library);
    }
    bool ok = true;
    const auto attention = find<AttentionFunction>("kernelhub_attention");
    const auto has = find<HasProducts>("kernelhub_attention_has");
    const char *by[] = {"", ", by AMX", ", by AVX-512 BF16"};  // as `Products` of csrc/cpu/attention_call.h
    for (const AttentionCase &c : attention_cases())
        for (int64_t products = 0; products < 3; products++)
            if (!products || has(products, c.kind, c.kv_kind))
                ok &= tell(std::string(c.name) + by[products], [&](int64_t threads, Report &report) {
                    AttentionRun(c, products).run(attention, threads, Random(1), report);
                });
    const auto gemm = find<Fp8Gemm>("kernelhub_fp8_gemm");
    const auto batched = find<BmmFp8>("kernelhub_bmm_fp8");
    const auto element = find<ElementBytes>("kernelhub_fp8_gemm_element_bytes");
    ok &= tell("every code of e4m3", [&](int64_t, Report &report) { decodes(report, element); });
    for (const GemmCase &c : gemm_cases())
        ok &= tell(c.name, [&](int64_t threads, Report &report) { run_gemm(c, gemm, element, threads, Random(2), report); });
    ok &=
        tell("bmm fp8", [&](int64_t threads, Report &report) { run_batched(batched, element, threads, Random(3), report); });
    const ExpertsFunctions experts{find<ElementBytes>("kernelhub_experts_element_bytes"),
                                   find<Sort>("kernelhub_experts_sort"), find<Prepare>("kernelhub_experts_prepare"),
                                   find<Multiply>("kernelhub_experts_multiply"), find<Gather>("kernelhub_experts_gather")};
    for (const ExpertsCase &c : experts_cases())
        ok &= tell(c.name, [&](int64_t threads, Report &report) { ExpertsRun(c, experts, threads, Random(4)).run(report); });
    const auto route = find<Route>("kernelhub_route");
    for (const RouteCase &c : route_cases())
        ok &= tell(c.name, [&](int64_t threads, Report &report) { RouteRun(c).run(route, threads, Random(5), report); });
    return ok ? 0 : 1;
}
