// Host time of n kernels with 20 parameters: launched one by one, and as one
// CUDA graph whose nodes get parameters.
//
//     nvcc -O2 -std=c++17 scripts/measure_launches.cu -lcuda -o
//     measure_launches && ./measure_launches
//
// Prints one line for each n, in microseconds, without and with 100 KB of
// shared memory. A figure is the median of 41 samples, each the mean of 60
// calls, after which the GPU is waited for. Then the memory that 256 graphs of
// 5 take.
#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                            \
  do {                                                                         \
    CUresult status = (call);                                                  \
    if (status != CUDA_SUCCESS) {                                              \
      const char *text = "";                                                   \
      cuGetErrorString(status, &text);                                         \
      std::fprintf(stderr, "%s: %s\n", #call, text);                           \
      std::exit(1);                                                            \
    }                                                                          \
  } while (0)

typedef unsigned long long Word;

extern "C" __global__ void kernel(Word a, Word b, Word, Word, Word, Word, Word,
                                  Word, Word, Word, Word, Word, Word, Word,
                                  Word, Word, Word, Word, Word, Word last) {
  if (a == 1)
    *(int *)b = last;
}

static double now_us() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

template <class Call> static double median_us(Call call) {
  std::vector<double> samples;
  for (int sample = 0; sample < 41; sample++) {
    double start = now_us();
    for (int at = 0; at < 60; at++)
      call();
    samples.push_back((now_us() - start) / 60);
    CHECK(cuCtxSynchronize());
  }
  std::sort(samples.begin(), samples.end());
  return samples[20];
}

// A chain of n kernels.
static CUgraph chain(CUDA_KERNEL_NODE_PARAMS &params,
                     std::vector<CUgraphNode> &nodes) {
  CUgraph graph;
  CHECK(cuGraphCreate(&graph, 0));
  for (size_t at = 0; at < nodes.size(); at++)
    CHECK(cuGraphAddKernelNode(&nodes[at], graph, at ? &nodes[at - 1] : nullptr,
                               at ? 1 : 0, &params));
  return graph;
}

int main() {
  CUdevice device;
  CUcontext context;
  CUstream stream;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CHECK(cuCtxSetCurrent(context));
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  cudaFunction_t symbol;
  if (cudaGetFuncBySymbol(&symbol, (const void *)kernel) != cudaSuccess)
    return 1;
  CUfunction function = (CUfunction)symbol;
  Word arguments[20] = {0};
  void *parameters[20];
  for (int at = 0; at < 20; at++)
    parameters[at] = &arguments[at];

  CUDA_KERNEL_NODE_PARAMS params{};
  params.func = function, params.kernelParams = parameters;
  params.gridDimX = 132, params.gridDimY = params.gridDimZ = 1;
  params.blockDimX = 128, params.blockDimY = params.blockDimZ = 1;
  for (unsigned shared : {0u, 100u << 10}) {
    CHECK(cuFuncSetAttribute(function,
                             CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                             (int)shared));
    params.sharedMemBytes = shared;
    for (int n : {1, 2, 3, 4, 5}) {
      CUlaunchAttribute dependent{};
      dependent.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
      dependent.value.programmaticStreamSerializationAllowed = 1;
      CUlaunchConfig config{};
      config.gridDimX = 132, config.gridDimY = config.gridDimZ = 1;
      config.blockDimX = 128, config.blockDimY = config.blockDimZ = 1;
      config.sharedMemBytes = shared, config.hStream = stream,
      config.attrs = &dependent;
      double plain = median_us([&] {
        for (int at = 0; at < n; at++)
          CHECK(cuLaunchKernel(function, 132, 1, 1, 128, 1, 1, shared, stream,
                               parameters, nullptr));
      });
      auto launch_ex = [&] {
        for (int at = 0; at < n; at++)
          CHECK(cuLaunchKernelEx(&config, function, parameters, nullptr));
      };
      double ex = median_us(launch_ex);
      config.numAttrs = 1;
      double programmatic = median_us(launch_ex);

      std::vector<CUgraphNode> nodes(n);
      CUgraph graph = chain(params, nodes);
      CUgraphExec exec;
      CHECK(cuGraphInstantiate(&exec, graph, 0));
      CHECK(cuGraphUpload(exec, stream));
      CHECK(cuGraphLaunch(exec, stream));
      CHECK(cuCtxSynchronize());
      double alone = median_us([&] { CHECK(cuGraphLaunch(exec, stream)); });
      double all = median_us([&] {
        arguments[2]++;
        for (CUgraphNode node : nodes)
          CHECK(cuGraphExecKernelNodeSetParams(exec, node, &params));
        CHECK(cuGraphLaunch(exec, stream));
      });
      double one = median_us([&] {
        arguments[2]++;
        CHECK(cuGraphExecKernelNodeSetParams(exec, nodes.back(), &params));
        CHECK(cuGraphLaunch(exec, stream));
      });
      std::printf("%3u KB shared, n %d: launch %.2f, ex %.2f, programmatic "
                  "%.2f, graph %.2f, all parameters %.2f, "
                  "one node's %.2f us\n",
                  shared >> 10, n, plain, ex, programmatic, alone, all, one);
      CHECK(cuGraphExecDestroy(exec));
      CHECK(cuGraphDestroy(graph));
    }
  }

  size_t before, after, total;
  std::vector<CUgraphNode> nodes(5);
  CHECK(cuMemGetInfo(&before, &total));
  for (int at = 0; at < 256; at++) {
    CUgraphExec exec;
    CHECK(cuGraphInstantiate(&exec, chain(params, nodes), 0));
    CHECK(cuGraphUpload(exec, stream));
  }
  CHECK(cuCtxSynchronize());
  CHECK(cuMemGetInfo(&after, &total));
  std::printf("256 graphs of 5 kernels: %.1f MB of the device's memory\n",
              (double)(before - after) / (1 << 20));
}
