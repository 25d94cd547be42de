/* What of cuda.h the launcher needs, the limits of what it holds, and what a module has. */
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <float.h>
#include <stdalign.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
  MAX_PARAMETERS = 192,
  MAX_BYTES = 16384, /* of all parameters of a launch, or of all launches of a sequence */
  MAX_OPERANDS = 64,
  MAX_STEPS = 8,
  MAX_FORMS = 4,
  MAX_RESULTS = 8,
  MAX_CALLS = 64,    /* of an op, whole ones */
  MAX_MISSED = 256,  /* of an op, signatures of calls that are counted */
  LEARNED_AFTER = 4, /* calls, a power of two */
  MAX_RANK = 5,
  MAX_KEPT = 8,          /* tensors of a layer, and of a step */
  MAP_BYTES = 128,       /* CUtensorMap */
  INVALID_CONTEXT = 201, /* CUDA_ERROR_INVALID_CONTEXT */
  RELAXED = 2,           /* CU_STREAM_CAPTURE_MODE_RELAXED */
  MAX_GRAPHS = 4,        /* of a sequence, each for one stream */
  MAX_NODES = 2048,      /* of a driver's graphs, each a kernel: some 45 MB of an H200's memory */
  IDLE_LAUNCHES = 256,   /* of a sequence, after which another stream may take a graph's place */
  MAX_ROOMS = 16,        /* of a driver, each for one stream */
  MOST_ROOM = 64 << 20,  /* bytes of one, */
  MOST_ROOMS = 256 << 20 /* and of all */
};

/* CUlaunchAttribute and CUlaunchConfig of cuda.h. */
typedef struct {
  uint32_t id, padding;
  union {
    uint64_t all[8];
    uint32_t words[16];
  } value;
} Attribute;

typedef struct {
  uint32_t grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  uint32_t num_attributes;
} Config;

typedef int (*LaunchFunction)(const Config*, void* function, void** parameters, void** extra);
typedef int (*CapturingFunction)(void* stream, int* status);
typedef int (*EncodeFunction)(void* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                              const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                              int swizzle, int promotion, int fill);

enum { CAPTURED_ONLY = 2, CAPTURED_OR_GRAPH = 3 }; /* of `programmatic`; in a graph of this launcher it is none */

/* Ids of CUlaunchAttributeID. */
enum { COOPERATIVE = 2, CLUSTER_DIMENSION = 4, CLUSTER_SCHEDULING = 5, PROGRAMMATIC_STREAM = 6, PRIORITY = 8 };

typedef struct { /* CUDA_KERNEL_NODE_PARAMS, version 2 */
  void* function;
  uint32_t grid[3], block[3], shared_bytes;
  void **parameters, **extra, *kernel, *context;
} NodeParams;

/* The driver's functions of graphs, in the order in which Python gives them. */
typedef struct {
  int (*create)(void** graph, unsigned flags);
  int (*add)(void** node, void* graph, void* const* after, size_t count, const NodeParams*);
  int (*set_attribute)(void* node, int id, const void* value);
  int (*instantiate)(void** exec, void* graph, uint64_t flags);
  int (*upload)(void* exec, void* stream);
  int (*set)(void* exec, void* node, const NodeParams*);
  int (*launch)(void* exec, void* stream);
  int (*destroy_exec)(void* exec);
  int (*destroy)(void* graph);
  int (*exchange_mode)(int* mode);
  int (*stream_id)(void* stream, uint64_t* id);
  int (*priority)(void* stream, int* priority);
  int (*green_context)(void* stream, void** context);
} GraphFunctions;

enum { NUM_GRAPH_FUNCTIONS = sizeof(GraphFunctions) / sizeof(void*) };

typedef struct { /* changed by atomic additions */
  int64_t live, nodes, made, launches, updates, evicted, refused, status;
} GraphCounts;

typedef struct {   /* memory for the temporaries of a stream's sequences, which come one after the other */
  uint64_t stream; /* its number, which no other stream gets */
  long device;     /* which the number of a default stream may not tell apart */
  uint64_t bytes, address;
  PyObject* memory;
  int busy; /* whether a sequence is launching with it */
} Room;

static unsigned forks; /* of this process from others, as far as Python knows of them */

typedef struct {
  PyObject* driver_type;
  PyObject* kernel_type;
  PyObject* sequence_type;
  PyObject* forms_type;
  PyObject* known_type;
  PyObject* call_type;
  PyObject* calls_type;
  PyObject* layer_type;
  PyObject* layers_type;
} State;

static PyObject *name_enter, *name_leave, *name_calls, *name_base, *name_shape, *name_strides, *name_padding,
    *name_nested, *name_level, *name_self, *name_next, *name_names;
