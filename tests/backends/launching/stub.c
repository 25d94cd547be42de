/* A libcuda for machines without a GPU: it loads any module, and notes what is launched. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef int Status;

enum { MOST = 64, MOST_BYTES = 4096 };
typedef struct {
  uint32_t numbers[8]; /* grid, block, shared bytes, number of attributes */
  uint64_t stream, function;
  uint32_t attributes[4][4]; /* id and three words of the value */
  uint32_t num_parameters;
  unsigned char values[MOST_BYTES];
} Noted;

Noted noted[MOST];
int num_noted, num_encoded, next_status, param_count, param_sizes[256];
/* Of functions whose parameters are known: sizes, where launches of several are noted. */
enum { MOST_FUNCTIONS = 256 };
int num_known, known_counts[MOST_FUNCTIONS], known_sizes[MOST_FUNCTIONS][256];
uint64_t known_functions[MOST_FUNCTIONS];
uint64_t encoded_address;

static void note_parameters(Noted* at, void** parameters) {
  const int* sizes = param_sizes;
  int count = param_count;
  for (int known = 0; known < num_known; known++)
    if (known_functions[known] == at->function) sizes = known_sizes[known], count = known_counts[known];
  size_t begin = 0;
  for (int of = 0; of < count && begin + (size_t)sizes[of] <= MOST_BYTES; of++) {
    memcpy(at->values + begin, parameters[of], (size_t)sizes[of]);
    begin += (size_t)sizes[of];
  }
  at->num_parameters = (uint32_t)count;
}
Status cuLaunchKernelEx(const uint32_t* config, void* function, void** parameters, void** extra) {
  (void)extra;
  int status = next_status;
  next_status = 0;
  if (status) return status;
  Noted* at = &noted[num_noted++ % MOST];
  memset(at, 0, sizeof *at);
  memcpy(at->numbers, config, 28);
  memcpy(&at->stream, (const char*)config + 32, 8);
  const char* attributes;
  memcpy(&attributes, (const char*)config + 40, 8);
  memcpy(&at->numbers[7], (const char*)config + 48, 4);
  for (uint32_t of = 0; of < at->numbers[7] && of < 4; of++) {
    memcpy(at->attributes[of], attributes + 72 * of, 4);
    memcpy(&at->attributes[of][1], attributes + 72 * of + 8, 12);
  }
  at->function = (uint64_t)function;
  note_parameters(at, parameters);
  return 0;
}
/* Graphs: nodes note their launches, an executable graph has copies of them, and a launch of it is that of each. Calls
 * are noted by their number in `launch.GRAPH_FUNCTIONS`; what is unsafe beside a capture needs the thread's relaxed mode. */
enum { CREATE, ADD, SET_ATTRIBUTE, INSTANTIATE, UPLOAD, SET, LAUNCH, DESTROY_EXEC, DESTROY, MODE, ID, PRIORITY, GREEN };
enum { MOST_NODES = 8, UNSUPPORTED = 900 };
typedef struct Graph Graph;
typedef struct {
  Noted noted;
  Graph* graph;
  int at;
} Node;
struct Graph {
  int num_nodes, in_use;
  Node nodes[MOST_NODES];
};
typedef struct {
  void* function;
  uint32_t numbers[7];
  void **parameters, **extra, *kernel, *context;
} NodeParams;
int graph_calls[16], fail_graph[16], num_graphs, num_execs, stream_priority;
int num_overlaps, num_torn; /* entries while another thread was in one, launches with parameters of two calls */
uint64_t green_context, stream_generation;
static __thread int thread_mode;
static int failing(int call) {
  graph_calls[call]++;
  int status = fail_graph[call];
  fail_graph[call] = 0;
  if (status == 0 && (call == ADD || call == INSTANTIATE || call == UPLOAD || call == SET || call == DESTROY_EXEC) &&
      thread_mode != 2)
    status = UNSUPPORTED;
  return status;
}
static void note_node(Noted* at, const NodeParams* params) {
  memcpy(at->numbers, params->numbers, 28);
  at->function = (uint64_t)params->function;
  note_parameters(at, params->parameters);
}
Status cuGraphCreate(Graph** graph, unsigned flags) {
  int status = failing(CREATE);
  if (status || flags) return status ? status : 1;
  num_graphs++;
  return *graph = calloc(1, sizeof **graph), 0;
}
Status cuGraphAddKernelNode_v2(Node** node, Graph* graph, Node* const* after, size_t count, const NodeParams* params) {
  int status = failing(ADD), at = graph->num_nodes;
  if (status) return status;
  if (count != (at > 0) || (at > 0 && *after != &graph->nodes[at - 1]) || params->extra) return 1; /* no chain */
  *node = &graph->nodes[graph->num_nodes++];
  (*node)->graph = graph, (*node)->at = at;
  note_node(&(*node)->noted, params);
  return 0;
}
Status cuGraphKernelNodeSetAttribute(Node* node, int id, const uint32_t* value) {
  int status = failing(SET_ATTRIBUTE);
  if (status || id == 6) return status ? status : 1; /* programmatic serialization is none of a node */
  uint32_t* words = node->noted.attributes[node->noted.numbers[7]++];
  words[0] = (uint32_t)id;
  memcpy(words + 1, value, 12);
  return 0;
}
Status cuGraphInstantiateWithFlags(Graph** exec, Graph* graph, uint64_t flags) {
  int status = failing(INSTANTIATE);
  if (status || flags) return status ? status : 1;
  num_execs++;
  *exec = malloc(sizeof **exec);
  return memcpy(*exec, graph, sizeof *graph), 0;
}
Status cuGraphUpload(Graph* exec, void* stream) { return (void)exec, (void)stream, failing(UPLOAD); }
static void begin_use(Graph* exec) {
  if (__atomic_fetch_add(&exec->in_use, 1, __ATOMIC_ACQ_REL)) __atomic_fetch_add(&num_overlaps, 1, __ATOMIC_RELAXED);
  sched_yield();
}
static void end_use(Graph* exec) { __atomic_fetch_sub(&exec->in_use, 1, __ATOMIC_ACQ_REL); }
Status cuGraphExecKernelNodeSetParams_v2(Graph* exec, Node* node, const NodeParams* params) {
  int status = failing(SET);
  if (status) return status;
  if (node != &node->graph->nodes[node->at]) return 1; /* reads the graph, which must live */
  begin_use(exec);
  note_node(&exec->nodes[node->at].noted, params);
  end_use(exec);
  return 0;
}
Status cuGraphLaunch(Graph* exec, void* stream) {
  int status = failing(LAUNCH);
  if (status == 0) status = next_status, next_status = 0;
  begin_use(exec);
  if (exec->num_nodes > 1 && memcmp(exec->nodes[0].noted.values + 8, exec->nodes[1].noted.values, 8)) num_torn++;
  for (int at = 0; status == 0 && at < exec->num_nodes; at++) {
    Noted* made = &noted[num_noted++ % MOST];
    *made = exec->nodes[at].noted;
    made->stream = (uint64_t)stream;
  }
  end_use(exec);
  return status;
}
Status cuGraphExecDestroy(Graph* exec) { return num_execs--, free(exec), failing(DESTROY_EXEC); }
Status cuGraphDestroy(Graph* graph) { return num_graphs--, free(graph), failing(DESTROY); }
Status cuThreadExchangeStreamCaptureMode(int* mode) {
  int before = thread_mode;
  thread_mode = *mode, *mode = before;
  return failing(MODE);
}
Status cuStreamGetId(uint64_t stream, uint64_t* id) { return *id = stream + (stream_generation << 48), failing(ID); }
Status cuStreamGetPriority(void* stream, int* priority) {
  return (void)stream, *priority = stream_priority, failing(PRIORITY);
}
Status cuStreamGetGreenCtx(void* stream, uint64_t* context) {
  return (void)stream, *context = green_context, failing(GREEN);
}

int capturing;
Status cuStreamIsCapturing(void* stream, int* status) {
  (void)stream;
  *status = capturing;
  return 0;
}
Status cuFuncGetParamInfo(void* function, size_t at, size_t* offset, size_t* size) {
  (void)function;
  if ((int)at >= param_count) return 1;
  *offset = 8 * at;
  *size = (size_t)param_sizes[at];
  return 0;
}
Status cuTensorMapEncodeTiled(unsigned char* map, int type, uint32_t rank, uint64_t address, const uint64_t* sizes,
                              const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                              int swizzle, int promotion, int fill) {
  int status = next_status;
  next_status = 0;
  if (status) return status;
  num_encoded++;
  encoded_address = address;
  memset(map, 0, 128);
  uint32_t facts[8] = {(uint32_t)type, rank, (uint32_t)interleave, (uint32_t)swizzle, (uint32_t)promotion, (uint32_t)fill};
  memcpy(map, facts, 24);
  memcpy(map + 24, &address, 8);
  memcpy(map + 32, sizes, 8 * (rank < 4 ? rank : 4));
  memcpy(map + 64, strides, 8 * (rank < 4 ? rank - 1 : 3));
  memcpy(map + 88, box, 4 * rank);
  memcpy(map + 108, steps, 4 * rank);
  return 0;
}
Status cuGetErrorName(int status, const char** text) {
  *text = status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : status == 1 ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OTHER";
  return 0;
}
Status cuGetErrorString(int status, const char** text) {
  *text = status == 700 ? "an illegal memory access was encountered" : status == 1 ? "invalid argument" : "other";
  return 0;
}
int entered;
Status cuPointerGetAttribute(uint64_t* found, int attribute, uint64_t pointer) { return (void)attribute, *found = pointer, 0; }
Status cuCtxGetCurrent(void** context) { return *context = (void*)1, 0; }
Status cuCtxSetCurrent(void* context) { return (void)context, entered++, 0; }
Status cuDeviceGet(int* device, int at) { return *device = at, 0; }
Status cuDevicePrimaryCtxRetain(void** context, int device) { return (void)device, *context = (void*)1, 0; }
Status cuModuleLoadData(void** module, const void* image) { return (void)image, *module = (void*)2, 0; }
Status cuModuleGetFunction(uint64_t* function, void* module, const char* name) {
  static uint64_t last = 0x1230;
  return (void)module, (void)name, *function = last += 16, 0;
}
Status cuFuncGetAttribute(int* found, int attribute, void* function) {
  return (void)function, *found = attribute == 0 ? 1024 : 0, 0;
}
Status cuDeviceGetAttribute(int* found, int attribute, int device) { return (void)attribute, (void)device, *found = 227 * 1024, 0; }
Status cuInit(unsigned flags) { return (void)flags, 0; }
Status cuDriverGetVersion(int* version) { return *version = 13000, 0; }
static Status nothing(void) { return 0; }
Status cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
  (void)version, (void)flags;
  static void* self;
  if (self == NULL) {
    Dl_info info;
    dladdr((void*)cuInit, &info);
    self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }
  void* found = dlsym(self, name);
  *function = found ? found : (void*)nothing;
  if (status) *status = 0;
  return 0;
}
Status cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, 0);
}
/* What else Triton links against. */
#define NOTHING(name) Status name(void) { return 0; }
NOTHING(cuCtxGetLimit) NOTHING(cuCtxSetLimit) NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig)
NOTHING(cuLaunchKernel) NOTHING(cuCtxGetDevice) NOTHING(cuModuleUnload) NOTHING(cuOccupancyMaxActiveClusters)
NOTHING(cuMemAlloc) NOTHING(cuMemAlloc_v2) NOTHING(cuMemFree) NOTHING(cuMemFree_v2)
