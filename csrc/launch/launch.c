/* Launches compiled kernels from Python: a call packs its arguments and enters cuLaunchKernelEx, nothing else.
 *
 * Python gives the driver's functions by their addresses, so nothing is linked against CUDA and no header of it is
 * needed. Arguments are packed on the stack of the call, so threads share kernels without a lock. Tensors are asked for
 * `data_ptr` through torch's own C function, which is looked up once. The module keeps to Python's stable ABI, so one
 * build serves 3.10 and later: methods with METH_FASTCALL are called as fast as by vectorcall.
 */
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

enum { CAPTURED_ONLY = 2 }; /* of `programmatic` */

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

/* ---- Driver: what belongs to a process ------------------------------------------------------------------------- */

typedef struct {
  PyObject_HEAD
  LaunchFunction launch;
  EncodeFunction encode;
  CapturingFunction capturing;
  PyTypeObject* tensor;    /* base class of all tensors */
  PyObject* data_ptr_of_a; /* a bound `data_ptr`, which keeps its function alive */
  PyCFunction data_ptr;
  PyObject* stream_of; /* device -> its current stream */
  PyCFunction stream_function;
  PyObject* stream_self;
  PyObject* failed;   /* (status, kernel) -> exception */
  PyObject* enter;    /* device -> None; makes the device's context current in this thread */
  PyObject* allocate; /* (bytes, stream) -> memory as a tensor or an address; or None: there are no temporaries */
  PyObject* release;  /* (memory); or None: it goes with the object */
  PyObject* current;  /* () -> the current device; or None */
  PyCFunction current_function;
  PyObject* current_self;
  PyObject* runtime; /* has launch_enter_hook and launch_exit_hook; or None */
  PyObject* own; /* attributes of `runtime` itself, which has no hook of its own as long as there are none; or NULL */
  PyObject* chains[2]; /* attributes of the hooks of its class */
  PyObject* nested;    /* the descriptor of a tensor's `is_nested` */
  descrgetfunc nested_of;
  PyObject* counters;                    /* (device, stream) -> the address of its counters, or 0 */
  void* (*pointer_of)(PyObject* tensor); /* torch's own, for tensors that have memory; or NULL */
  GraphFunctions graphs;
  uint64_t graph_after; /* launches of a sequence before it becomes a graph; 0: none does */
  int graph_least;      /* kernels of a sequence that becomes one */
  int graph_shared;     /* whether sequences over memory of all ranks become graphs, too */
  PyTypeObject* usual;  /* see `is_usual` */
  Py_ssize_t impl_at;
  uint64_t table; /* 0: no tensor is usual */
  GraphCounts counts;
  Room rooms[MAX_ROOMS];
  int num_rooms;
} Driver;

/* Find the attributes by which it is quick to see that no hook is set: those of the chains of hooks that the class of
 * `runtime` has. */
static void find_chains(Driver* self) {
  PyObject* own = self->runtime == Py_None ? NULL : PyObject_GetAttr(self->runtime, name_names);
  PyObject* names[2] = {name_enter, name_leave};
  int found = own != NULL && PyDict_Check(own) && PyDict_Size(own) == 0;
  for (int at = 0; found && at < 2; at++) {
    PyObject* hook = PyObject_GetAttr(self->runtime, names[at]);
    self->chains[at] = hook == NULL ? NULL : PyObject_GetAttr(hook, name_names);
    Py_XDECREF(hook);
    PyObject* calls = self->chains[at] == NULL || !PyDict_Check(self->chains[at])
                          ? NULL
                          : PyDict_GetItemWithError(self->chains[at], name_calls);
    found = calls != NULL && PyList_Check(calls);
  }
  PyErr_Clear();
  if (found) self->own = own;
  else Py_XDECREF(own);
}

static int driver_init(PyObject* object, PyObject* args, PyObject* named) {
  static char* names[] = {"launch",       "encode",   "tensor",  "data_ptr",    "stream_of",   "failed",
                          "enter",        "current",  "runtime", "allocate",    "release",     "nested",
                          "capturing",    "counters", "graphs",  "graph_after", "graph_least", "pointer_of",
                          "graph_shared", "usual",    NULL};
  Driver* self = (Driver*)object;
  unsigned long long launch, encode, capturing, graph_after = 0, pointer_of = 0;
  int graph_least = 1, graph_shared = 0;
  PyObject *graphs = NULL, *usual = NULL;
  PyObject *tensor, *data_ptr, *stream_of, *failed, *enter, *current, *runtime, *allocate, *release, *nested, *counters;
  if (!PyArg_ParseTupleAndKeywords(args, named, "KKOOOOOOOOOOKO|O!KiKpO", names, &launch, &encode, &tensor, &data_ptr,
                                   &stream_of, &failed, &enter, &current, &runtime, &allocate, &release, &nested,
                                   &capturing, &counters, &PyTuple_Type, &graphs, &graph_after, &graph_least,
                                   &pointer_of, &graph_shared, &usual))
    return -1;
  PyObject* of_python = NULL;
  Py_ssize_t impl_at = 0;
  unsigned long long table = 0;
  if (usual != NULL && usual != Py_None &&
      (!PyTuple_Check(usual) || !PyArg_ParseTuple(usual, "O!nK", &PyType_Type, &of_python, &impl_at, &table))) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "usual: a class, an offset and a word, or None");
    return -1;
  }
  if (self->tensor != NULL) {
    PyErr_SetString(PyExc_TypeError, "a Driver is made once");
    return -1;
  }
  if (!launch || !PyType_Check(tensor) || !PyObject_TypeCheck(data_ptr, &PyCFunction_Type) ||
      PyCFunction_GetFlags(data_ptr) != METH_NOARGS) {
    PyErr_SetString(PyExc_TypeError,
                    "launch is the address of a function, tensor a class, data_ptr a C method without arguments");
    return -1;
  }
  Py_ssize_t given = graphs == NULL ? 0 : PyTuple_Size(graphs);
  void* functions[NUM_GRAPH_FUNCTIONS];
  for (Py_ssize_t at = 0; at < given && given == NUM_GRAPH_FUNCTIONS; at++) {
    functions[at] = PyLong_AsVoidPtr(PyTuple_GetItem(graphs, at));
    if (functions[at] == NULL) break;
    if (at + 1 < given || !capturing) continue;
    memcpy(&self->graphs, functions, sizeof functions);
    self->graph_after = graph_after;
    self->graph_least = graph_least;
    self->graph_shared = graph_shared;
  }
  if (PyErr_Occurred()) return -1;
  if (given && (self->graphs.stream_id == NULL || graph_least < 1)) {
    PyErr_Format(PyExc_ValueError, "graphs need %d functions, one that says what is captured, and at least one launch",
                 NUM_GRAPH_FUNCTIONS);
    return -1;
  }
  self->launch = (LaunchFunction)(uintptr_t)launch;
  self->encode = (EncodeFunction)(uintptr_t)encode;
  self->capturing = (CapturingFunction)(uintptr_t)capturing;
  self->pointer_of = (void* (*)(PyObject*))(uintptr_t)pointer_of;
  self->data_ptr = PyCFunction_GetFunction(data_ptr);
  if (PyObject_TypeCheck(stream_of, &PyCFunction_Type) && PyCFunction_GetFlags(stream_of) == METH_O) {
    self->stream_function = PyCFunction_GetFunction(stream_of);
    self->stream_self = PyCFunction_GetSelf(stream_of); /* borrowed of stream_of */
  }
  if (PyObject_TypeCheck(current, &PyCFunction_Type) && PyCFunction_GetFlags(current) == METH_NOARGS) {
    self->current_function = PyCFunction_GetFunction(current);
    self->current_self = PyCFunction_GetSelf(current);
  }
  Py_INCREF(tensor), Py_INCREF(data_ptr), Py_INCREF(stream_of), Py_INCREF(failed), Py_INCREF(enter), Py_INCREF(current);
  Py_INCREF(runtime), Py_INCREF(allocate), Py_INCREF(release), Py_INCREF(nested), Py_INCREF(counters);
  Py_XINCREF(of_python);
  self->usual = (PyTypeObject*)of_python;
  self->impl_at = impl_at;
  self->table = table;
  self->counters = counters;
  self->nested = nested;
  self->nested_of = (descrgetfunc)PyType_GetSlot(Py_TYPE(nested), Py_tp_descr_get);
  self->current = current;
  self->allocate = allocate;
  self->release = release;
  self->tensor = (PyTypeObject*)tensor;
  self->data_ptr_of_a = data_ptr;
  self->stream_of = stream_of;
  self->failed = failed;
  self->enter = enter;
  self->runtime = runtime;
  find_chains(self);
  return 0;
}

static void driver_dealloc(PyObject* object) {
  Driver* self = (Driver*)object;
  PyTypeObject* type = Py_TYPE(object);
  Py_XDECREF(self->tensor);
  Py_XDECREF(self->data_ptr_of_a);
  Py_XDECREF(self->stream_of);
  Py_XDECREF(self->failed);
  Py_XDECREF(self->enter);
  Py_XDECREF(self->current);
  Py_XDECREF(self->runtime);
  Py_XDECREF(self->own);
  for (int at = 0; at < 2; at++) Py_XDECREF(self->chains[at]);
  Py_XDECREF(self->allocate);
  Py_XDECREF(self->release);
  Py_XDECREF(self->nested);
  Py_XDECREF(self->counters);
  Py_XDECREF(self->usual);
  for (int at = 0; at < self->num_rooms; at++) Py_XDECREF(self->rooms[at].memory);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static PyObject* driver_graph_counts(PyObject* object, PyObject* nothing) {
  (void)nothing;
  GraphCounts* of = &((Driver*)object)->counts;
  const char* names[] = {"live", "nodes", "made", "launches", "updates", "evicted", "refused", "status"};
  int64_t* counts[] = {&of->live,    &of->nodes,   &of->made,    &of->launches,
                       &of->updates, &of->evicted, &of->refused, &of->status};
  PyObject* found = PyDict_New();
  for (size_t at = 0; found != NULL && at < sizeof names / sizeof *names; at++) {
    PyObject* count = PyLong_FromLongLong(__atomic_load_n(counts[at], __ATOMIC_RELAXED));
    if (count == NULL || PyDict_SetItemString(found, names[at], count) < 0) Py_CLEAR(found);
    Py_XDECREF(count);
  }
  return found;
}

/* Whether one of the profiler's hooks is set: 1, 0, or -1 with an exception. */
static int hooked(Driver* driver) {
  if (driver->runtime == Py_None) return 0;
  if (driver->own != NULL && PyDict_Size(driver->own) == 0) {
    Py_ssize_t empty = 0;
    for (int at = 0; at < 2; at++) {
      PyObject* calls = PyDict_GetItemWithError(driver->chains[at], name_calls);
      empty += calls != NULL && PyList_Check(calls) && PyList_Size(calls) == 0;
    }
    if (empty == 2) return 0;
    if (PyErr_Occurred()) return -1;
  }
  PyObject* names[2] = {name_enter, name_leave};
  for (int at = 0; at < 2; at++) {
    PyObject* hook = PyObject_GetAttr(driver->runtime, names[at]);
    if (hook == NULL) return -1;
    int set = hook != Py_None;
    if (set) {
      PyObject* calls = PyObject_GetAttr(hook, name_calls);
      if (calls == NULL) {
        PyErr_Clear(); /* a plain function is a hook, too */
      } else {
        Py_ssize_t count = PyObject_Size(calls);
        Py_DECREF(calls);
        if (count < 0) {
          Py_DECREF(hook);
          return -1;
        }
        set = count > 0;
      }
    }
    Py_DECREF(hook);
    if (set) return 1;
  }
  return 0;
}

/* Whether a device is current in this thread: 1, 0, or -1 with an exception. */
static int is_current(Driver* driver, PyObject* device) {
  if (driver->current == Py_None) return 1;
  PyObject* now = driver->current_function ? driver->current_function(driver->current_self, NULL)
                                           : PyObject_CallFunctionObjArgs(driver->current, NULL);
  if (now == NULL) return -1;
  int same = PyObject_RichCompareBool(now, device, Py_EQ);
  Py_DECREF(now);
  return same;
}

/* The current stream of a device; -1 with an exception. */
static int current_stream(Driver* driver, PyObject* device, void** stream) {
  PyObject* found = driver->stream_function ? driver->stream_function(driver->stream_self, device)
                                            : PyObject_CallFunctionObjArgs(driver->stream_of, device, NULL);
  if (found == NULL) return -1;
  *stream = PyLong_AsVoidPtr(found);
  Py_DECREF(found);
  return *stream == NULL && PyErr_Occurred() ? -1 : 0;
}

/* The address of a tensor; an int is one already. */
static int address_of(Driver* driver, PyObject* operand, Py_ssize_t at, uint64_t* address) {
  PyObject* number;
  if (PyObject_TypeCheck(operand, driver->tensor)) {
    number = driver->data_ptr(operand, NULL);
    if (number == NULL) return -1;
  } else if (PyLong_Check(operand)) {
    number = operand;
    Py_INCREF(number);
  } else {
    PyErr_Format(PyExc_TypeError, "argument %zd must be a tensor: the kernel was compiled for one, got %R", at,
                 (PyObject*)Py_TYPE(operand));
    return -1;
  }
  *address = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  return *address == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* ---- Kernel: a compiled function with the kinds of its arguments ------------------------------------------------ */

typedef struct { /* a tensor map that was encoded, and what for */
  uint64_t address, sizes[MAX_RANK], strides[MAX_RANK];
  int known, padded;
  unsigned char map[MAP_BYTES];
} Encoded;

typedef struct { /* how tensors become tensor maps */
  int swizzle, item_bytes, type, rank, fp4_padded;
  uint32_t box[MAX_RANK];
  Encoded last;
} Map;

typedef struct {
  PyObject_HEAD
  Driver* driver;
  PyObject *owner, *name, *device;
  void* function;
  char* kinds; /* of all arguments, see `kernel_init` */
  Py_ssize_t num_arguments, num_parameters;
  uint16_t offsets[MAX_PARAMETERS]; /* of the parameters, scratch pointers included */
  Map* maps;
  Py_ssize_t num_maps, num_bytes;
  Config config;
  int overlaps_captured; /* the last attribute, a programmatic launch, is for launches that are captured */
  Attribute attributes[4];
} Kernel;

static Py_ssize_t size_of(char kind) {
  switch (kind) {
    case 'b':
    case 'B': return 1;
    case 'h':
    case 'H': return 2;
    case 'i':
    case 'I':
    case 'f': return 4;
    case 'P':
    case 'q':
    case 'Q':
    case 'd': return 8;
    default: return 0;
  }
}

static int add_parameter(Kernel* self, Py_ssize_t size, Py_ssize_t alignment) {
  Py_ssize_t offset = (self->num_bytes + alignment - 1) / alignment * alignment;
  if (self->num_parameters == MAX_PARAMETERS || offset + size > MAX_BYTES) {
    PyErr_Format(PyExc_ValueError, "at most %d parameters of %d bytes", MAX_PARAMETERS, MAX_BYTES);
    return -1;
  }
  self->offsets[self->num_parameters++] = (uint16_t)offset;
  self->num_bytes = offset + size;
  return 0;
}

static int read_map(Map* map, PyObject* facts) {
  PyObject* box;
  if (!PyArg_ParseTuple(facts, "iiiiO!", &map->swizzle, &map->item_bytes, &map->type, &map->fp4_padded, &PyTuple_Type,
                        &box))
    return -1;
  map->rank = (int)PyTuple_Size(box);
  if (map->rank < 1 || map->rank > MAX_RANK) {
    PyErr_SetString(PyExc_ValueError, "a tensor map has 1 to 5 dimensions");
    return -1;
  }
  for (int at = 0; at < map->rank; at++) { /* the driver counts from the innermost */
    map->box[map->rank - 1 - at] = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GetItem(box, at));
  }
  return PyErr_Occurred() ? -1 : 0;
}

static int kernel_init(PyObject* object, PyObject* args, PyObject* named) {
  static char* names[] = {"driver", "function", "kinds", "name",    "device",      "threads",      "shared_bytes",
                          "owner",  "scratch",  "maps",  "cluster", "cooperative", "programmatic", NULL};
  Kernel* self = (Kernel*)object;
  State* state = PyModule_GetState(PyType_GetModule(Py_TYPE(object)));
  PyObject *driver, *name, *device, *owner = Py_None, *maps = NULL;
  const char* kinds;
  unsigned long long function;
  int threads, shared_bytes, scratch = 0, cluster = 1, cooperative = 0, programmatic = 0;
  if (state == NULL ||
      !PyArg_ParseTupleAndKeywords(args, named, "O!KsOOii|OiO!ipi", names, state->driver_type, &driver, &function,
                                   &kinds, &name, &device, &threads, &shared_bytes, &owner, &scratch, &PyTuple_Type,
                                   &maps, &cluster, &cooperative, &programmatic))
    return -1;
  if (self->driver != NULL) {
    PyErr_SetString(PyExc_TypeError, "a Kernel is made once");
    return -1;
  }
  if (((Driver*)driver)->tensor == NULL) {
    PyErr_SetString(PyExc_TypeError, "the Driver was not initialised");
    return -1;
  }
  self->num_maps = maps == NULL ? 0 : PyTuple_Size(maps);
  self->maps = self->num_maps ? calloc((size_t)self->num_maps, sizeof(Map)) : NULL;
  self->num_arguments = (Py_ssize_t)strlen(kinds);
  self->kinds = malloc((size_t)self->num_arguments + 1);
  if (self->kinds == NULL || (self->num_maps && self->maps == NULL)) {
    PyErr_NoMemory();
    return -1;
  }
  memcpy(self->kinds, kinds, (size_t)self->num_arguments + 1);
  for (Py_ssize_t at = 0; at < self->num_maps; at++) {
    if (read_map(&self->maps[at], PyTuple_GetItem(maps, at)) < 0) return -1;
  }
  Py_ssize_t mapped = 0;
  for (Py_ssize_t at = 0; at < self->num_arguments; at++) {
    char kind = kinds[at];
    if (kind == '-') continue;
    if (kind == 'T') {
      if (mapped == self->num_maps) {
        PyErr_SetString(PyExc_ValueError, "fewer maps than kinds 'T'");
        return -1;
      }
      int rank = self->maps[mapped++].rank;
      if (add_parameter(self, MAP_BYTES, 64) < 0) return -1;
      for (int of = 0; of < 2 * rank; of++) { /* sizes as int32, then strides as int64 */
        Py_ssize_t bytes = of < rank ? 4 : 8;
        if (add_parameter(self, bytes, bytes) < 0) return -1;
      }
      continue;
    }
    Py_ssize_t bytes = size_of(kind);
    if (bytes == 0) {
      PyErr_Format(PyExc_ValueError, "unknown kind %c of argument %zd", kind, at);
      return -1;
    }
    if (add_parameter(self, bytes, bytes) < 0) return -1;
  }
  if (mapped != self->num_maps) {
    PyErr_SetString(PyExc_ValueError, "more maps than kinds 'T'");
    return -1;
  }
  for (int at = 0; at < scratch; at++) {
    if (add_parameter(self, 8, 8) < 0) return -1;
  }
  self->config = (Config){{1, 1, 1}, {(uint32_t)threads, 1, 1}, (uint32_t)shared_bytes, NULL, self->attributes, 0};
  Attribute* next = self->attributes;
  if (cooperative) *next++ = (Attribute){COOPERATIVE, 0, .value.words = {1}};
  if (cluster > 1) {
    *next++ = (Attribute){CLUSTER_DIMENSION, 0, .value.words = {(uint32_t)cluster, 1, 1}};
    *next++ = (Attribute){CLUSTER_SCHEDULING, 0, .value.words = {1}}; /* spread */
  }
  if (programmatic) *next++ = (Attribute){PROGRAMMATIC_STREAM, 0, .value.words = {1}};
  self->overlaps_captured = programmatic == CAPTURED_ONLY;
  self->config.num_attributes = (uint32_t)(next - self->attributes);
  self->function = (void*)(uintptr_t)function;
  Py_INCREF(driver), Py_INCREF(name), Py_INCREF(device), Py_INCREF(owner);
  self->name = name;
  self->device = device;
  self->owner = owner;
  self->driver = (Driver*)driver;
  return 0;
}

static void kernel_dealloc(PyObject* object) {
  Kernel* self = (Kernel*)object;
  PyTypeObject* type = Py_TYPE(object);
  Py_XDECREF(self->driver);
  Py_XDECREF(self->name);
  Py_XDECREF(self->device);
  Py_XDECREF(self->owner);
  free(self->kinds);
  free(self->maps);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static int does_not_fit(Kernel* self, Py_ssize_t at, PyObject* value) {
  PyErr_Clear();
  PyErr_Format(PyExc_OverflowError, "argument %zd of %S: %R does not fit its parameter of kind '%c'", at, self->name,
               value, self->kinds[at]);
  return -1;
}

static int pack_integer(Kernel* self, Py_ssize_t at, PyObject* value, unsigned char* slot) {
  char kind = self->kinds[at];
  if (kind == 'Q') {
    unsigned long long wide = PyLong_AsUnsignedLongLong(value);
    if (wide == (unsigned long long)-1 && PyErr_Occurred())
      return PyErr_ExceptionMatches(PyExc_OverflowError) ? does_not_fit(self, at, value) : -1;
    memcpy(slot, &wide, 8);
    return 0;
  }
  long long wide = PyLong_AsLongLong(value);
  if (wide == -1 && PyErr_Occurred())
    return PyErr_ExceptionMatches(PyExc_OverflowError) ? does_not_fit(self, at, value) : -1;
  Py_ssize_t bytes = size_of(kind);
  if (bytes < 8) {
    int bits = (int)(8 * bytes);
    int is_signed = kind >= 'a';
    long long least = is_signed ? -(1LL << (bits - 1)) : 0, most = (1LL << (is_signed ? bits - 1 : bits)) - 1;
    if (wide < least || wide > most) return does_not_fit(self, at, value);
  }
  memcpy(slot, &wide, (size_t)bytes); /* both machines that CUDA runs on are little-endian */
  return 0;
}

/* Numbers of a tuple or list into `found`; -1 with an exception. */
static int read_sizes(PyObject* sequence, int rank, uint64_t* found) {
  PyObject* sizes = PySequence_Tuple(sequence);
  if (sizes == NULL) return -1;
  int status = 0;
  if (PyTuple_Size(sizes) != rank) {
    PyErr_Format(PyExc_ValueError, "a descriptor of %d dimensions, the kernel was compiled for %d",
                 (int)PyTuple_Size(sizes), rank);
    status = -1;
  }
  for (int at = 0; status == 0 && at < rank; at++) {
    found[at] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(sizes, at));
    if (found[at] == (uint64_t)-1 && PyErr_Occurred()) status = -1;
  }
  Py_DECREF(sizes);
  return status;
}

static PyObject* raise_status(Driver* driver, int status, PyObject* name) {
  PyObject* number = PyLong_FromLong(status);
  PyObject* error = number == NULL ? NULL : PyObject_CallFunctionObjArgs(driver->failed, number, name, NULL);
  Py_XDECREF(number);
  if (error != NULL) {
    PyErr_SetObject((PyObject*)Py_TYPE(error), error);
    Py_DECREF(error);
  }
  return NULL;
}

/* Encode the map of a descriptor's address, sizes and strides into it; -1 with an exception. */
static int encode(Kernel* self, const Map* map, Encoded* now) {
  if (self->driver->encode == NULL) {
    PyErr_SetString(PyExc_RuntimeError, "the CUDA driver has no cuTensorMapEncodeTiled");
    return -1;
  }
  uint64_t sizes[MAX_RANK], bytes[MAX_RANK];
  uint32_t steps[MAX_RANK] = {1, 1, 1, 1, 1};
  for (int of = 0; of < map->rank; of++) {
    int inner = map->rank - 1 - of;
    sizes[inner] = now->sizes[of] * (inner == 0 && map->fp4_padded ? 2 : 1);
    if (inner > 0) bytes[inner - 1] = now->strides[of] * (uint64_t)map->item_bytes;
  }
  alignas(64) unsigned char encoded[MAP_BYTES] = {0};
  int status = self->driver->encode(encoded, map->type, (uint32_t)map->rank, (void*)(uintptr_t)now->address, sizes,
                                    bytes, map->box, steps, 0, map->swizzle, 2, now->padded);
  if (status != 0) {
    raise_status(self->driver, status, self->name);
    return -1;
  }
  memcpy(now->map, encoded, MAP_BYTES);
  now->known = 1;
  return 0;
}

/* A descriptor as its parameters: the map, encoded anew if address, sizes or strides changed, its sizes and strides. */
static int pack_map(Kernel* self, Map* map, Py_ssize_t at, PyObject* descriptor, unsigned char* values,
                    const uint16_t* offsets) {
  Encoded now;
  memset(&now, 0, sizeof now);
  PyObject* base = PyObject_GetAttr(descriptor, name_base);
  if (base == NULL || address_of(self->driver, base, at, &now.address) < 0) {
    Py_XDECREF(base);
    return -1;
  }
  Py_DECREF(base);
  PyObject *shape = PyObject_GetAttr(descriptor, name_shape), *strides = PyObject_GetAttr(descriptor, name_strides);
  PyObject* padding = PyObject_GetAttr(descriptor, name_padding);
  int failed = shape == NULL || strides == NULL || padding == NULL || read_sizes(shape, map->rank, now.sizes) < 0 ||
               read_sizes(strides, map->rank, now.strides) < 0;
  if (!failed) {
    now.padded = PyUnicode_Check(padding) && PyUnicode_CompareWithASCIIString(padding, "nan") == 0;
    failed = PyErr_Occurred() != NULL;
  }
  Py_XDECREF(shape);
  Py_XDECREF(strides);
  Py_XDECREF(padding);
  if (failed) return -1;
  Encoded* last = &map->last;
  int same = last->known && last->address == now.address && last->padded == now.padded &&
             !memcmp(last->sizes, now.sizes, sizeof now.sizes) &&
             !memcmp(last->strides, now.strides, sizeof now.strides);
  if (!same) {
    last->known = 0;
    if (encode(self, map, &now) < 0) return -1;
    *last = now;
  }
  memcpy(values + offsets[0], last->map, MAP_BYTES);
  for (int of = 0; of < map->rank; of++) {
    uint32_t size = (uint32_t)now.sizes[of];
    memcpy(values + offsets[1 + of], &size, 4);
    memcpy(values + offsets[1 + map->rank + of], &now.strides[of], 8);
  }
  return 0;
}

/* All arguments into `values`. */
static int pack(Kernel* self, PyObject* const* given, unsigned char* values) {
  const uint16_t* offset = self->offsets;
  const char* kinds = self->kinds;
  Map* map = self->maps;
  for (Py_ssize_t at = 0; at < self->num_arguments; at++) {
    PyObject* argument = given[at];
    switch (kinds[at]) {
      case '-':
        if (PyObject_TypeCheck(argument, self->driver->tensor)) {
          PyErr_Format(PyExc_TypeError, "argument %zd of %S: the kernel was compiled without this tensor", at,
                       self->name);
          return -1;
        }
        break;
      case 'P': {
        uint64_t address;
        if (address_of(self->driver, argument, at, &address) < 0) return -1;
        memcpy(values + *offset++, &address, 8);
        break;
      }
      case 'T':
        if (pack_map(self, map, at, argument, values, offset) < 0) return -1;
        offset += 1 + 2 * map->rank;
        map++;
        break;
      case 'f':
      case 'd': {
        double wide = PyFloat_AsDouble(argument);
        if (wide == -1.0 && PyErr_Occurred()) return -1;
        float narrow = (float)wide;
        if (kinds[at] == 'f') memcpy(values + *offset++, &narrow, 4);
        else memcpy(values + *offset++, &wide, 8);
        break;
      }
      default:
        if (pack_integer(self, at, argument, values + *offset++) < 0) return -1;
    }
  }
  for (; offset < self->offsets + self->num_parameters; offset++) memset(values + *offset, 0, 8); /* scratch */
  return 0;
}

static int read_grid(PyObject* grid, uint32_t* sizes) {
  Py_ssize_t rank = 1;
  if (PyTuple_Check(grid)) {
    rank = PyTuple_Size(grid);
    if (rank < 1 || rank > 3) {
      PyErr_SetString(PyExc_ValueError, "a grid has 1 to 3 dimensions");
      return -1;
    }
  }
  sizes[1] = sizes[2] = 1;
  for (Py_ssize_t at = 0; at < rank; at++) {
    long long size = PyLong_AsLongLong(PyTuple_Check(grid) ? PyTuple_GetItem(grid, at) : grid);
    if (size == -1 && PyErr_Occurred()) return -1;
    if (size < 0 || size > INT32_MAX || (at > 0 && size > 65535)) {
      PyErr_Format(PyExc_ValueError, "a grid of %R: each size is 0 to 2147483647, the second and third to 65535", grid);
      return -1;
    }
    sizes[at] = (uint32_t)size;
  }
  return 0;
}

typedef struct { /* one entry into the driver */
  Kernel* kernel;
  Config config;
  unsigned char* values;
} Launch;

static int is_captured(Driver* driver, void* stream) {
  int capturing = 0;
  return driver->capturing != NULL && driver->capturing(stream, &capturing) == 0 && capturing == 1;
}

/* Launch all in order on one stream; -1 with an exception. The interpreter's lock is free meanwhile: where the queue of
 * the GPU is full, the driver waits for work that may need the lock. */
static int launch_all(Driver* driver, PyObject* device, void* stream, Launch* launches, int count) {
  void* parameters[MAX_PARAMETERS];
  int at = 0, entered = 0, status;
  for (;;) {
    status = 0;
    PyThreadState* thread = PyEval_SaveThread();
    for (; at < count; at++) {
      Kernel* kernel = launches[at].kernel;
      for (Py_ssize_t of = 0; of < kernel->num_parameters; of++)
        parameters[of] = launches[at].values + kernel->offsets[of];
      Config config = launches[at].config;
      config.stream = stream;
      /* A programmatic launch takes the host 1.7 us more, which a graph does not pay again. */
      if (kernel->overlaps_captured && !is_captured(driver, stream)) config.num_attributes--;
      status = driver->launch(&config, kernel->function, parameters, NULL);
      if (status != 0) break;
    }
    PyEval_RestoreThread(thread);
    if (status != INVALID_CONTEXT || entered) break;
    entered = 1; /* a thread that has not used the device yet; nothing was launched */
    PyObject* done = PyObject_CallFunctionObjArgs(driver->enter, device, NULL);
    if (done == NULL) return -1;
    Py_DECREF(done);
  }
  if (status == 0) return 0;
  raise_status(driver, status, launches[at].kernel->name);
  return -1;
}

static Config config_of(Kernel* kernel, const uint32_t* grid) {
  Config config = kernel->config;
  memcpy(config.grid, grid, sizeof config.grid);
  for (uint32_t at = 0; at < config.num_attributes; at++) {
    if (kernel->attributes[at].id == CLUSTER_DIMENSION) config.grid[0] *= kernel->attributes[at].value.words[0];
  }
  return config;
}

static PyObject* kernel_launch(PyObject* object, PyObject* const* given, Py_ssize_t count) {
  Kernel* self = (Kernel*)object;
  if (self->driver == NULL || count != self->num_arguments + 1) {
    return PyErr_Format(PyExc_TypeError, "%S takes a grid and %zd arguments, got %zd",
                        self->name ? self->name : Py_None, self->num_arguments, count - 1);
  }
  uint32_t grid[3];
  alignas(64) unsigned char values[MAX_BYTES];
  if (read_grid(given[0], grid) < 0) return NULL;
  int set = hooked(self->driver);
  if (set < 0) return NULL;
  if (set) Py_RETURN_FALSE;
  if (pack(self, given + 1, values) < 0) return NULL;
  if (grid[0] && grid[1] && grid[2]) {
    Launch launch = {self, config_of(self, grid), values};
    void* stream;
    if (current_stream(self->driver, self->device, &stream) < 0 ||
        launch_all(self->driver, self->device, stream, &launch, 1) < 0)
      return NULL;
  }
  Py_RETURN_TRUE;
}

/* What a launch would pass: its grid and the bytes of each parameter. For tests and for those who look for a fault. */
static PyObject* kernel_packed(PyObject* object, PyObject* const* given, Py_ssize_t count) {
  Kernel* self = (Kernel*)object;
  if (self->driver == NULL || count != self->num_arguments) {
    return PyErr_Format(PyExc_TypeError, "takes %zd arguments, got %zd", self->num_arguments, count);
  }
  alignas(64) unsigned char values[MAX_BYTES];
  memset(values, 0, sizeof values);
  if (pack(self, given, values) < 0) return NULL;
  PyObject* packed = PyTuple_New(self->num_parameters);
  for (Py_ssize_t at = 0; packed != NULL && at < self->num_parameters; at++) {
    Py_ssize_t end = at + 1 < self->num_parameters ? self->offsets[at + 1] : self->num_bytes;
    PyObject* bytes = PyBytes_FromStringAndSize((char*)values + self->offsets[at], end - self->offsets[at]);
    if (bytes == NULL || PyTuple_SetItem(packed, at, bytes) < 0) Py_CLEAR(packed);
  }
  return packed;
}

/* ---- Sequence: launches whose scalars and grids stay the same --------------------------------------------------- */

typedef struct {
  uint16_t operand, offset; /* which operand's address, and where it goes */
  uint64_t beyond;          /* bytes added to it */
} Place;

typedef struct { /* a tensor map of an operand, and the one that was encoded last */
  Place place;
  const Map* facts; /* of the kernel */
  Encoded last;
} MapPlace;

typedef struct {
  Kernel* kernel;
  Config config;
  unsigned char* values;
  Place* places;
  Py_ssize_t num_places;
  MapPlace* maps;
  Py_ssize_t num_maps;
} Step;

typedef struct {   /* the launches of a sequence on one stream as a graph, a chain of kernels */
  uint64_t stream; /* its number, which no other stream gets */
  uint64_t used;   /* the sequence's launch that used it last */
  int num_nodes;
  void *graph, *exec, *nodes[MAX_STEPS];
  unsigned char* values; /* of the parameters that the nodes have */
} Graph;

typedef struct {
  PyObject_HEAD
  Driver* driver;
  PyObject* device;
  long index; /* of the device */
  int num_steps;
  Py_ssize_t num_operands; /* of a call, then the memory of the temporaries and the counters, if it has them */
  unsigned long long room; /* bytes of temporaries that the call allocates */
  uint64_t used, aligned;  /* one bit per operand */
  int closed;
  int counted; /* whether it takes the counters of its stream, which are zero between launches */
  int counted_before;
  void* counted_stream; /* whose counters were looked up last */
  uint64_t counters;
  const volatile uint64_t* zero;   /* memory of `owner` that has to be zero for a launch; or NULL */
  const volatile uint64_t* stream; /* the same that has to be the current stream; or NULL */
  PyObject* owner;
  Step steps[MAX_STEPS];
  Graph graphs[MAX_GRAPHS];
  int num_graphs;
  char busy;         /* whether a thread is using them */
  char refused;      /* whether launches stay plain */
  uint64_t launches; /* that could have been of a graph */
  unsigned forks;    /* as of the process that made it */
} Sequence;

/* How many operands a call gives. */
static Py_ssize_t given_of(const Sequence* self) { return self->num_operands - (self->room > 0) - self->counted; }

/* Bytes of a kernel's parameters, so that those of the next one are aligned. */
static Py_ssize_t rounded(const Kernel* kernel) { return (kernel->num_bytes + 63) / 64 * 64; }

static int read_step(Sequence* self, Step* step, PyObject* facts, State* state) {
  PyObject *kernel, *grid, *arguments, *places;
  uint32_t sizes[3];
  if (!PyTuple_Check(facts)) {
    PyErr_SetString(PyExc_TypeError, "a step is a tuple of kernel, grid, arguments and places");
    return -1;
  }
  if (!PyArg_ParseTuple(facts, "O!OO!O!", state->kernel_type, &kernel, &grid, &PyTuple_Type, &arguments, &PyTuple_Type,
                        &places) ||
      read_grid(grid, sizes) < 0)
    return -1;
  Kernel* of = (Kernel*)kernel;
  Py_ssize_t pointers = 0, count = PyTuple_Size(arguments), placed = PyTuple_Size(places);
  if (of->driver == NULL || count != of->num_arguments) {
    PyErr_SetString(PyExc_TypeError, "a step takes all arguments of its kernel");
    return -1;
  }
  if (self->driver != NULL &&
      (of->driver != self->driver || PyObject_RichCompareBool(of->device, self->device, Py_EQ) != 1)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the kernels of a sequence belong to one device");
    return -1;
  }
  for (Py_ssize_t at = 0; at < count; at++) {
    pointers += of->kinds[at] == 'P';
  }
  if (posix_memalign((void**)&step->values, 64, (size_t)rounded(of) + 64) != 0) step->values = NULL;
  else memset(step->values, 0, (size_t)rounded(of) + 64); /* bytes between parameters are compared, too */
  step->places = calloc((size_t)pointers + 1, sizeof(Place));
  step->maps = calloc((size_t)of->num_maps + 1, sizeof(MapPlace));
  if (step->values == NULL || step->places == NULL || step->maps == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  PyObject** given = calloc((size_t)count + 1, sizeof *given);
  if (given == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t at = 0; at < count; at++) given[at] = PyTuple_GetItem(arguments, at); /* borrowed of the tuple */
  int packed = pack(of, given, step->values);
  free(given);
  if (packed < 0) return -1;
  Py_ssize_t parameter = 0, place = 0, mapped = 0;
  for (Py_ssize_t at = 0; at < count; at++) {
    char kind = of->kinds[at];
    if (kind == '-') continue;
    const Map* map = kind == 'T' ? &of->maps[mapped++] : NULL;
    if (kind == 'P' || map) {
      unsigned short operand;
      unsigned long long beyond;
      PyObject* pair = at < placed ? PyTuple_GetItem(places, at) : Py_None;
      uint64_t address;
      if (map) address = map->last.address;
      else memcpy(&address, step->values + of->offsets[parameter], 8);
      int stays = pair == Py_None ? address == 0 : PyTuple_Check(pair) && PyTuple_Size(pair) == 0;
      if (!stays) { /* not a tensor without memory, and not one that is no operand of the call */
        if (!PyTuple_Check(pair)) {
          PyErr_Format(PyExc_ValueError, "argument %zd of %S is a tensor: its place names an operand and an offset", at,
                       of->name);
          return -1;
        }
        if (!PyArg_ParseTuple(pair, "HK", &operand, &beyond)) return -1;
        if (operand >= self->num_operands) {
          PyErr_Format(PyExc_ValueError, "operand %d of %zd", (int)operand, self->num_operands);
          return -1;
        }
        Place found = {operand, of->offsets[parameter], beyond};
        if (map) step->maps[step->num_maps++] = (MapPlace){found, map, map->last};
        else step->places[place++] = found;
        self->used |= 1ULL << operand;
      }
    }
    parameter += map ? 1 + 2 * map->rank : 1;
  }
  step->num_places = place;
  step->config = config_of(of, sizes);
  Py_INCREF(kernel);
  step->kernel = of;
  if (self->driver == NULL) {
    Py_INCREF(of->driver), Py_INCREF(of->device);
    self->driver = of->driver;
    self->device = of->device;
    self->index = PyLong_AsLong(of->device);
    if (PyErr_Occurred()) return -1;
  }
  return 0;
}

static int sequence_init(PyObject* object, PyObject* args, PyObject* named) {
  static char* names[] = {"steps", "operands", "aligned", "room", "counted", "zero", "stream", "owner", NULL};
  Sequence* self = (Sequence*)object;
  State* state = PyModule_GetState(PyType_GetModule(Py_TYPE(object)));
  PyObject *steps, *aligned, *owner = NULL;
  unsigned long long zero = 0, stream = 0;
  if (state == NULL ||
      !PyArg_ParseTupleAndKeywords(args, named, "O!nO!|KpKKO", names, &PyTuple_Type, &steps, &self->num_operands,
                                   &PyTuple_Type, &aligned, &self->room, &self->counted, &zero, &stream, &owner))
    return -1;
  Py_ssize_t count = PyTuple_Size(steps), bytes = 0;
  if (self->driver != NULL || count < 1 || count > MAX_STEPS || self->num_operands < 1 ||
      self->num_operands > MAX_OPERANDS) {
    PyErr_Format(PyExc_ValueError, "a sequence is made once, of 1 to %d steps and 1 to %d operands", MAX_STEPS,
                 MAX_OPERANDS);
    return -1;
  }
  if ((zero & 7) || (stream & 7) || ((zero || stream) && owner == NULL)) {
    PyErr_SetString(PyExc_ValueError, "words of eight bytes, aligned, in memory that `owner` keeps");
    return -1;
  }
  self->zero = (const volatile uint64_t*)(uintptr_t)zero;
  self->stream = (const volatile uint64_t*)(uintptr_t)stream;
  Py_XINCREF(owner);
  self->owner = owner;
  self->forks = forks;
  for (Py_ssize_t at = 0; at < PyTuple_Size(aligned); at++) {
    unsigned long operand = PyLong_AsUnsignedLong(PyTuple_GetItem(aligned, at));
    if (PyErr_Occurred()) return -1;
    if ((Py_ssize_t)operand >= self->num_operands) {
      PyErr_SetString(PyExc_ValueError, "an aligned operand that does not exist");
      return -1;
    }
    self->aligned |= 1ULL << operand;
  }
  for (Py_ssize_t at = 0; at < count; at++) {
    self->num_steps = (int)at + 1; /* so that dealloc frees what a failed step has */
    if (read_step(self, &self->steps[at], PyTuple_GetItem(steps, at), state) < 0) return -1;
    bytes += rounded(self->steps[at].kernel);
    if (bytes > MAX_BYTES) {
      PyErr_Format(PyExc_ValueError, "the parameters of a sequence take at most %d bytes", MAX_BYTES);
      return -1;
    }
  }
  if (given_of(self) < 0) {
    PyErr_SetString(PyExc_ValueError, "memory of temporaries and counters are operands, too");
    return -1;
  }
  if (self->counted && (self->driver->counters == Py_None || self->driver->capturing == NULL)) {
    PyErr_SetString(PyExc_ValueError, "the driver has no counters, or cannot say what is captured");
    return -1;
  }
  if (self->room && self->driver->allocate == Py_None) {
    PyErr_SetString(PyExc_ValueError, "the driver cannot allocate memory for temporaries");
    return -1;
  }
  return 0;
}

static void discard_all(Sequence* self);

static void sequence_dealloc(PyObject* object) {
  Sequence* self = (Sequence*)object;
  PyTypeObject* type = Py_TYPE(object);
  discard_all(self);
  for (int at = 0; at < self->num_steps; at++) {
    free(self->steps[at].values);
    free(self->steps[at].places);
    free(self->steps[at].maps);
    Py_XDECREF(self->steps[at].kernel);
  }
  Py_XDECREF(self->driver);
  Py_XDECREF(self->device);
  Py_XDECREF(self->owner);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

/* Memory of torch's allocator; -1 with an exception. */
static int allocate(Driver* driver, unsigned long long bytes, void* stream, PyObject** memory) {
  PyObject *size = PyLong_FromUnsignedLongLong(bytes), *on = PyLong_FromVoidPtr(stream);
  *memory = size == NULL || on == NULL ? NULL : PyObject_CallFunctionObjArgs(driver->allocate, size, on, NULL);
  Py_XDECREF(size);
  Py_XDECREF(on);
  return *memory == NULL ? -1 : 0;
}

/* Give memory back, an exception being kept: the launches that use it are in the stream, and what gets it next runs
 * after them. */
static int release(Driver* driver, PyObject* memory) {
  if (driver->release == Py_None) {
    Py_DECREF(memory);
    return 0;
  }
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject* done = PyObject_CallFunctionObjArgs(driver->release, memory, NULL);
  Py_DECREF(memory);
  if (done == NULL && type == NULL) return -1;
  if (done == NULL) PyErr_Clear();
  Py_XDECREF(done);
  PyErr_Restore(type, value, trace);
  return 0;
}

/* Whether nothing is captured from a stream, whose number is found then. */
static int number_of(Driver* driver, void* stream, uint64_t* id) {
  int captured = 0;
  return driver->graphs.stream_id != NULL && driver->capturing(stream, &captured) == 0 && !captured &&
         driver->graphs.stream_id(stream, id) == 0;
}

/* The room of a stream; NULL if there are too many. */
static Room* room_of(Driver* driver, uint64_t id, long device) {
  for (int at = 0; at < driver->num_rooms; at++) {
    if (driver->rooms[at].stream == id && driver->rooms[at].device == device) return &driver->rooms[at];
  }
  if (driver->num_rooms == MAX_ROOMS) return NULL;
  Room* room = &driver->rooms[driver->num_rooms++];
  room->stream = id;
  room->device = device;
  return room;
}

/* What a room of at least so many bytes gets: powers of two, from 2 MB on multiples of that, as torch's allocator. */
static uint64_t room_bytes(uint64_t least) {
  const uint64_t large = 2 << 20;
  uint64_t bytes = 1 << 16;
  if (least > large) return (least + large - 1) / large * large;
  while (bytes < least) bytes *= 2;
  return bytes;
}

/* Memory for the temporaries of a sequence: `room`, which is busy until the launches are made, or else `memory`, which
 * has to be given back then; -1 with an exception.
 *
 * Launches of a stream follow each other, so they share a room; torch's allocator would take longer than a launch as a
 * graph. What is captured has memory of its own, since it may be replayed on any stream. */
static int take_memory(Sequence* self, void* stream, const uint64_t* id, Room** room, PyObject** memory,
                       uint64_t* address) {
  Driver* driver = self->driver;
  Room* found = id == NULL || self->room > MOST_ROOM ? NULL : room_of(driver, *id, self->index);
  uint64_t all_bytes = found == NULL || found->bytes >= self->room ? 0 : room_bytes(self->room);
  for (int at = 0; all_bytes && at < driver->num_rooms; at++) {
    if (&driver->rooms[at] != found) all_bytes += driver->rooms[at].bytes;
  }
  /* One may be busy with another thread, whose launches would come in between. */
  if (found == NULL || found->busy || all_bytes > MOST_ROOMS) {
    if (allocate(driver, self->room, stream, memory) < 0) return -1;
    if (address_of(driver, *memory, given_of(self), address) == 0) return 0;
    Py_CLEAR(*memory);
    return -1;
  }
  found->busy = 1;
  if (found->bytes < self->room) {
    PyObject *larger = NULL, *smaller = found->memory;
    uint64_t bytes = room_bytes(self->room), begin;
    if (allocate(driver, bytes, stream, &larger) < 0 || address_of(driver, larger, given_of(self), &begin) < 0) {
      Py_XDECREF(larger);
      found->busy = 0;
      return -1;
    }
    found->memory = larger;
    found->bytes = bytes;
    found->address = begin;
    if (smaller != NULL && release(driver, smaller) < 0) {
      found->busy = 0;
      return -1;
    }
  }
  *room = found;
  *address = found->address;
  return 0;
}

/* The address of a stream's counters: 1, 0 if the launches have to do without, or -1 with an exception. They are zero
 * only between launches of one stream; a graph that captures the launches may be replayed on another. */
static int counters_of(Sequence* self, void* stream, int numbered, uint64_t* address) {
  int capturing = 0;
  if (!numbered && (self->driver->capturing(stream, &capturing) != 0 || capturing)) return 0;
  if (!self->counted_before || self->counted_stream != stream) {
    PyObject* on = PyLong_FromVoidPtr(stream);
    PyObject* found = on == NULL ? NULL : PyObject_CallFunctionObjArgs(self->driver->counters, self->device, on, NULL);
    Py_XDECREF(on);
    if (found == NULL) return -1;
    uint64_t now = PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    if (now == (uint64_t)-1 && PyErr_Occurred()) return -1;
    if (now == 0) return 0;
    self->counters = now;
    self->counted_stream = stream;
    self->counted_before = 1;
  }
  *address = self->counters;
  return 1;
}

/* ---- Graphs: the launches of a sequence in one entry into the driver ---------------------------------------------
 *
 * A sequence keeps, for each of a few streams, a graph whose nodes are its kernels in a chain. A launch gives the nodes
 * whose parameters changed the new ones and launches the graph; both affect later work only, so the graph may be in
 * flight. Graphs of CUDA are for one thread at a time: one that finds them in use launches plainly, as one does into a
 * capture. */

static void tally(int64_t* of, int64_t more) { __atomic_fetch_add(of, more, __ATOMIC_RELAXED); }

/* Free a graph. One that is in flight is freed by the driver when it is done. */
static void discard(Driver* driver, Graph* graph) {
  if (graph->exec) driver->graphs.destroy_exec(graph->exec);
  if (graph->graph) driver->graphs.destroy(graph->graph);
  free(graph->values);
  tally(&driver->counts.nodes, -graph->num_nodes);
  tally(&driver->counts.live, -1);
  memset(graph, 0, sizeof *graph);
}

/* Free the graphs of a sequence that nobody uses any more; those of the process before a fork are its own. */
static void discard_all(Sequence* self) {
  if (self->num_graphs == 0 || self->forks != forks) return;
  PyThreadState* thread = PyEval_SaveThread(); /* as for launches: the driver may wait */
  int mode = RELAXED, exchanged = self->driver->graphs.exchange_mode(&mode) == 0;
  while (self->num_graphs) discard(self->driver, &self->graphs[--self->num_graphs]);
  if (exchanged) self->driver->graphs.exchange_mode(&mode);
  PyEval_RestoreThread(thread);
}

/* Let a sequence launch plainly from now on: the driver refused something. */
static void refuse(Sequence* self, int status) {
  GraphCounts* counts = &self->driver->counts;
  self->refused = 1;
  tally(&counts->refused, 1);
  __atomic_store_n(&counts->status, status, __ATOMIC_RELAXED);
  while (self->num_graphs) discard(self->driver, &self->graphs[--self->num_graphs]);
}

/* What follows when the driver did not make or change a graph. A thread that has not used the device yet only loses the
 * graph: it has no context, and gets one with its plain launch. */
static void give_up(Sequence* self, Graph* graph, int status) {
  if (status != INVALID_CONTEXT) {
    refuse(self, status);
    return;
  }
  discard(self->driver, graph);
  *graph = self->graphs[--self->num_graphs];
}

static NodeParams params_of(const Launch* launch, unsigned char* values, void** parameters) {
  const Kernel* kernel = launch->kernel;
  const Config* config = &launch->config;
  NodeParams params = {.function = kernel->function, .shared_bytes = config->shared_bytes, .parameters = parameters};
  memcpy(params.grid, config->grid, sizeof params.grid);
  memcpy(params.block, config->block, sizeof params.block);
  for (Py_ssize_t of = 0; of < kernel->num_parameters; of++) parameters[of] = values + kernel->offsets[of];
  return params;
}

/* A new graph of the launches: the driver's status. */
static int make_graph(Driver* driver, Graph* graph, void* stream, const Launch* launches, int count, size_t bytes) {
  const GraphFunctions* of = &driver->graphs;
  void* parameters[MAX_PARAMETERS];
  int priority = 0, status;
  graph->values = malloc(bytes);
  if (graph->values == NULL) return 2; /* CUDA_ERROR_OUT_OF_MEMORY */
  memcpy(graph->values, launches[0].values, bytes);
  if ((status = of->priority(stream, &priority)) != 0 || (status = of->create(&graph->graph, 0)) != 0) return status;
  for (int at = 0; at < count; at++) {
    const Kernel* kernel = launches[at].kernel;
    NodeParams params =
        params_of(&launches[at], graph->values + (launches[at].values - launches[0].values), parameters);
    status = of->add(&graph->nodes[at], graph->graph, at ? &graph->nodes[at - 1] : NULL, at ? 1 : 0, &params);
    for (uint32_t one = 0; status == 0 && one < launches[at].config.num_attributes; one++)
      status = of->set_attribute(graph->nodes[at], (int)kernel->attributes[one].id, &kernel->attributes[one].value);
    if (status == 0 && priority != 0) { /* a node does not take that of the stream */
      Attribute attribute = {PRIORITY, 0, .value.words = {(uint32_t)priority}};
      status = of->set_attribute(graph->nodes[at], PRIORITY, &attribute.value);
    }
    if (status != 0) return status;
  }
  if ((status = of->instantiate(&graph->exec, graph->graph, 0)) != 0) return status;
  return of->upload(graph->exec, stream);
}

/* The graph of a stream, made now if it was not yet; NULL if the launches are plain. */
static Graph* graph_of(Sequence* self, void* stream, uint64_t id, const Launch* launches, int count, size_t bytes) {
  Driver* driver = self->driver;
  int oldest = 0, full = self->num_graphs == MAX_GRAPHS;
  for (int at = 0; at < self->num_graphs; at++) {
    if (self->graphs[at].stream == id) return &self->graphs[at];
    if (self->graphs[at].used < self->graphs[oldest].used) oldest = at;
  }
  if (full && self->launches - self->graphs[oldest].used < IDLE_LAUNCHES) return NULL;
  if (!full && __atomic_load_n(&driver->counts.nodes, __ATOMIC_RELAXED) + count > MAX_NODES) return NULL;
  void* green = NULL; /* its kernels run on a part of the multiprocessors, those of a graph would not */
  int status = driver->graphs.green_context(stream, &green);
  if ((status != 0 && stream != NULL) || green != NULL) return NULL;
  if (full) {
    discard(driver, &self->graphs[oldest]);
    self->graphs[oldest] = self->graphs[--self->num_graphs];
    tally(&driver->counts.evicted, 1);
  }
  Graph* graph = &self->graphs[self->num_graphs++];
  memset(graph, 0, sizeof *graph);
  graph->stream = id;
  graph->num_nodes = count;
  tally(&driver->counts.nodes, count);
  tally(&driver->counts.live, 1);
  status = make_graph(driver, graph, stream, launches, count, bytes);
  if (status != 0) {
    give_up(self, graph, status);
    return NULL;
  }
  tally(&driver->counts.made, 1);
  return graph;
}

/* The launches by the graph of their stream: 1; 0 if they have to be plain, nothing being launched; -1 with `status`.
 */
static int use_graph(Sequence* self, void* stream, uint64_t id, const Launch* launches, int count, size_t bytes,
                     int* status) {
  Driver* driver = self->driver;
  void* parameters[MAX_PARAMETERS];
  Graph* graph = graph_of(self, stream, id, launches, count, bytes);
  if (graph == NULL) return 0;
  graph->used = self->launches;
  for (int at = 0; at < count; at++) {
    unsigned char* kept = graph->values + (launches[at].values - launches[0].values);
    size_t size = (size_t)launches[at].kernel->num_bytes;
    if (!memcmp(kept, launches[at].values, size)) continue;
    memcpy(kept, launches[at].values, size);
    NodeParams params = params_of(&launches[at], kept, parameters);
    if ((*status = driver->graphs.set(graph->exec, graph->nodes[at], &params)) != 0) {
      give_up(self, graph, *status);
      return 0;
    }
    tally(&driver->counts.updates, 1);
  }
  *status = driver->graphs.launch(graph->exec, stream);
  if (*status == 0) {
    tally(&driver->counts.launches, 1);
    return 1;
  }
  if (*status == INVALID_CONTEXT) return 0;
  refuse(self, *status);
  return -1; /* whether something was launched is not known, so nothing is launched again */
}

/* The same, where a sequence may be a graph; -1 with an exception. */
static int launch_as_graph(Sequence* self, void* stream, uint64_t id, const Launch* launches, int count, size_t bytes) {
  Driver* driver = self->driver;
  if (driver->graph_after == 0 || count < driver->graph_least || self->forks != forks) return 0;
  if (self->owner != NULL && !driver->graph_shared) return 0; /* its kernels wait for other ranks */
  for (int at = 0; at < count; at++) {
    for (uint32_t one = 0; one < launches[at].config.num_attributes; one++) { /* it is none of a node */
      if (launches[at].kernel->attributes[one].id == PROGRAMMATIC_STREAM) return 0;
    }
  }
  if (__atomic_test_and_set(&self->busy, __ATOMIC_ACQUIRE)) return 0;
  int launched = 0, status = 0;
  if (!self->refused && ++self->launches > driver->graph_after) {
    PyThreadState* thread = PyEval_SaveThread();
    int mode = RELAXED; /* another thread may capture */
    if (driver->graphs.exchange_mode(&mode) == 0) {
      launched = use_graph(self, stream, id, launches, count, bytes, &status);
      driver->graphs.exchange_mode(&mode);
    }
    PyEval_RestoreThread(thread);
  }
  __atomic_clear(&self->busy, __ATOMIC_RELEASE);
  if (launched < 0) raise_status(driver, status, launches[0].kernel->name);
  return launched;
}

/* 1: launched, 0: not, since it has to be launched otherwise, -1: an exception. `known` has the addresses of all
 * operands, if they were looked up before. */
static int launch_sequence(Sequence* self, PyObject* const* given, const uint64_t* known) {
  uint64_t addresses[MAX_OPERANDS], unaligned = 0;
  Py_ssize_t count = given_of(self);
  int left = self->closed || (self->zero != NULL && *self->zero != 0) ? 1 : hooked(self->driver);
  if (left == 0) left = 1 - is_current(self->driver, self->device);
  if (left != 0) return left == 1 ? 0 : -1;
  for (Py_ssize_t at = 0; at < count; at++) {
    uint64_t bit = 1ULL << at;
    if (!((self->used | self->aligned) & bit)) continue;
    if (known == NULL && given[at] == Py_None && !(self->used & bit)) continue;
    if (known != NULL) addresses[at] = known[at];
    else if (address_of(self->driver, given[at], at, &addresses[at]) < 0) return -1;
    if (self->aligned & bit) unaligned |= addresses[at];
  }
  if (unaligned & 15) return 0;
  void* stream;
  if (current_stream(self->driver, self->device, &stream) < 0) return -1;
  if (self->stream != NULL && *self->stream != (uint64_t)(uintptr_t)stream) return 0;
  uint64_t id;
  int numbered = number_of(self->driver, stream, &id);
  if (self->counted) {
    int counted = counters_of(self, stream, numbered, &addresses[self->num_operands - 1]);
    if (counted != 1) return counted;
  }
  Room* room = NULL;
  PyObject* memory = NULL;
  if (self->room && take_memory(self, stream, numbered ? &id : NULL, &room, &memory, &addresses[count]) < 0) return -1;
  alignas(64) unsigned char values[MAX_BYTES];
  Launch launches[MAX_STEPS];
  Py_ssize_t begin = 0;
  int entered = 0, status = 0;
  for (int at = 0; at < self->num_steps; at++) {
    Step* step = &self->steps[at];
    if (!step->config.grid[0] || !step->config.grid[1] || !step->config.grid[2]) continue;
    memcpy(values + begin, step->values, (size_t)step->kernel->num_bytes);
    for (Py_ssize_t of = 0; of < step->num_places; of++) {
      Place place = step->places[of];
      uint64_t address = addresses[place.operand] + place.beyond;
      memcpy(values + begin + place.offset, &address, 8);
    }
    for (Py_ssize_t of = 0; of < step->num_maps && status == 0; of++) {
      MapPlace* map = &step->maps[of];
      uint64_t address = addresses[map->place.operand] + map->place.beyond;
      if (address != map->last.address) {
        Encoded now = map->last;
        now.address = address;
        if ((status = encode(step->kernel, map->facts, &now)) == 0) map->last = now;
      }
      memcpy(values + begin + map->place.offset, map->last.map, MAP_BYTES);
    }
    launches[entered++] = (Launch){step->kernel, step->config, values + begin};
    begin += rounded(step->kernel);
  }
  if (entered && status == 0) {
    int launched = numbered ? launch_as_graph(self, stream, id, launches, entered, (size_t)begin) : 0;
    status = launched != 0 ? launched : launch_all(self->driver, self->device, stream, launches, entered);
  }
  if (room != NULL) room->busy = 0;
  if (memory != NULL && release(self->driver, memory) < 0) status = -1;
  return status < 0 ? -1 : 1;
}

static PyObject* sequence_launch(PyObject* object, PyObject* const* given, Py_ssize_t count) {
  Sequence* self = (Sequence*)object;
  Py_ssize_t wanted = given_of(self);
  if (self->driver == NULL || count != wanted)
    return PyErr_Format(PyExc_TypeError, "takes %zd operands, got %zd", wanted, count);
  int launched = launch_sequence(self, given, NULL);
  return launched < 0 ? NULL : PyBool_FromLong(launched);
}

static PyObject* sequence_close(PyObject* object, PyObject* nothing) {
  (void)nothing;
  ((Sequence*)object)->closed = 1;
  Py_RETURN_NONE;
}

static PyObject* sequence_closed(PyObject* object, PyObject* nothing) {
  (void)nothing;
  return PyBool_FromLong(((Sequence*)object)->closed);
}

/* ---- Known: calls that the checks of an op have let through ------------------------------------------------------ */

typedef struct { /* two operands, and the differences of their addresses at which they may share memory */
  uint16_t one, other;
  int64_t least, most; /* exclusive */
} Gap;

typedef struct {
  PyObject_HEAD
  Driver* driver;
  PyObject* holds; /* (*tensors) -> whether they have the form; none of them may be nested */
  PyCFunction function;
  PyObject* self; /* of `function`, borrowed of holds */
  Py_ssize_t num_operands, num_tensors;
  Py_ssize_t num_compared;       /* tensors, the first ones; the others were made for the call, in the form of it */
  uint16_t places[MAX_OPERANDS]; /* of the tensors among the operands; the others are None */
  uint64_t present;              /* one bit per operand */
  Gap* gaps;
  Py_ssize_t num_gaps;
  Gap* same; /* operands that begin at one address */
  Py_ssize_t num_same;
  int checked;                  /* the caller gives tensors only, none of them nested, wherever their memory is */
  Sequence* sequence;           /* the launches of the call; or NULL */
  uint16_t order[MAX_OPERANDS]; /* which of the tensors the sequence's operands are */
} Known;

static int read_pairs(PyObject* facts, int ranges, Py_ssize_t num_tensors, Gap** pairs, Py_ssize_t* count) {
  *count = PyTuple_Size(facts);
  *pairs = calloc((size_t)*count + 1, sizeof(Gap));
  if (*pairs == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  for (Py_ssize_t at = 0; at < *count; at++) {
    PyObject* fact = PyTuple_GetItem(facts, at);
    long long least = 0, most = 0;
    Gap* pair = &(*pairs)[at];
    if (!PyTuple_Check(fact)) {
      PyErr_SetString(PyExc_TypeError, "a pair of tensors is a tuple");
      return -1;
    }
    if (!(ranges ? PyArg_ParseTuple(fact, "HHLL", &pair->one, &pair->other, &least, &most)
                 : PyArg_ParseTuple(fact, "HH", &pair->one, &pair->other)))
      return -1;
    if (pair->one >= num_tensors || pair->other >= num_tensors) {
      PyErr_Format(PyExc_ValueError, "tensors %d and %d of %zd", pair->one, pair->other, num_tensors);
      return -1;
    }
    pair->least = least, pair->most = most;
  }
  return 0;
}

static int known_init(PyObject* object, PyObject* args, PyObject* named) {
  static char* names[] = {"driver", "holds", "operands", "places", "apart", "same", "checked", "fresh", NULL};
  Known* self = (Known*)object;
  State* state = PyModule_GetState(PyType_GetModule(Py_TYPE(object)));
  PyObject *driver, *holds, *places, *apart, *same;
  Py_ssize_t count, fresh = 0;
  if (state == NULL || !PyArg_ParseTupleAndKeywords(args, named, "O!OnO!O!O!|pn", names, state->driver_type, &driver,
                                                    &holds, &count, &PyTuple_Type, &places, &PyTuple_Type, &apart,
                                                    &PyTuple_Type, &same, &self->checked, &fresh))
    return -1;
  Py_ssize_t tensors = PyTuple_Size(places);
  if (self->driver != NULL || ((Driver*)driver)->tensor == NULL || count < 1 || count > MAX_OPERANDS || tensors < 1 ||
      tensors > count || fresh < 0 || fresh >= tensors) {
    PyErr_Format(PyExc_ValueError,
                 "made once, with a driver that is, for 1 to %d operands, at least one a tensor that is not fresh",
                 MAX_OPERANDS);
    return -1;
  }
  for (Py_ssize_t at = 0; at < tensors; at++) {
    unsigned long place = PyLong_AsUnsignedLong(PyTuple_GetItem(places, at));
    if (PyErr_Occurred()) return -1;
    if ((Py_ssize_t)place >= count || (at && place <= self->places[at - 1])) {
      PyErr_SetString(PyExc_ValueError, "places of tensors ascend, and each is one of the operands");
      return -1;
    }
    self->places[at] = (uint16_t)place;
    self->present |= 1ULL << place;
  }
  if (read_pairs(apart, 1, tensors, &self->gaps, &self->num_gaps) < 0 ||
      read_pairs(same, 0, tensors, &self->same, &self->num_same) < 0)
    return -1;
  if (PyObject_TypeCheck(holds, &PyCFunction_Type) && PyCFunction_GetFlags(holds) == METH_VARARGS) {
    self->function = PyCFunction_GetFunction(holds);
    self->self = PyCFunction_GetSelf(holds);
  }
  self->num_operands = count;
  self->num_tensors = tensors;
  self->num_compared = tensors - fresh;
  Py_INCREF(holds), Py_INCREF(driver);
  self->holds = holds;
  self->driver = (Driver*)driver;
  return 0;
}

static void known_dealloc(PyObject* object) {
  Known* self = (Known*)object;
  PyTypeObject* type = Py_TYPE(object);
  free(self->gaps);
  free(self->same);
  Py_XDECREF(self->sequence);
  Py_XDECREF(self->holds);
  Py_XDECREF(self->driver);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

/* Whether an operand is of torch's own class of tensors, in Python and in C++. Those of nested tensors are others, and
 * torch takes ten times as long to say so. */
static int is_usual(const Driver* driver, PyObject* operand) {
  const char* impl;
  uint64_t table;
  if (!driver->table || Py_TYPE(operand) != driver->usual) return 0;
  memcpy(&impl, (const char*)operand + driver->impl_at, sizeof impl);
  if (impl == NULL) return 0;
  memcpy(&table, impl, sizeof table);
  return table == driver->table;
}

/* Whether an operand is a tensor, and not nested: 1, 0, or -1 with an exception. */
static int is_plain(Driver* driver, PyObject* operand) {
  if (is_usual(driver, operand)) return 1;
  if (!PyObject_TypeCheck(operand, driver->tensor)) return 0;
  PyObject* nested = driver->nested_of ? driver->nested_of(driver->nested, operand, (PyObject*)Py_TYPE(operand))
                                       : PyObject_GetAttr(operand, name_nested);
  if (nested == NULL) return -1;
  int plain = nested == Py_False ? 1 : nested == Py_True ? 0 : PyObject_Not(nested);
  Py_DECREF(nested);
  return plain;
}

static PyObject* tuple_of(PyObject* const* given, Py_ssize_t count, const uint16_t* places) {
  PyObject* made = PyTuple_New(count);
  for (Py_ssize_t at = 0; made != NULL && at < count; at++) {
    PyObject* one = given[places ? places[at] : at];
    Py_INCREF(one);
    PyTuple_SetItem(made, at, one);
  }
  return made;
}

/* The address of a tensor whose form is known. */
static int address_of_known(Driver* driver, PyObject* tensor, Py_ssize_t at, uint64_t* address) {
  if (driver->pointer_of == NULL) return address_of(driver, tensor, at, address);
  *address = (uint64_t)(uintptr_t)driver->pointer_of(tensor);
  return 0;
}

/* Whether a call's checks would let it through again: 1, 0, or -1 with an exception.
 *
 * `tensors` are the operands that are tensors, or NULL. On 1 `addresses` has that of each tensor, if it is not checked
 * before. */
static int is_known(Known* self, PyObject* const* given, PyObject* tensors, uint64_t* addresses) {
  Py_ssize_t fresh = self->num_compared < self->num_tensors ? self->places[self->num_compared] : self->num_operands;
  for (Py_ssize_t at = 0; at < self->num_operands && !self->checked; at++) {
    if (self->present & (1ULL << at)) {
      if (at >= fresh) {
        if (Py_TYPE(given[at]) != Py_TYPE(given[self->places[0]])) return 0; /* in a mode of torch */
        continue;
      }
      int plain = is_plain(self->driver, given[at]);
      if (plain != 1) return plain;
    } else if (given[at] != Py_None) {
      return 0;
    }
  }
  PyObject* passed = tensors;
  if (passed == NULL && (passed = tuple_of(given, self->num_compared, self->places)) == NULL) return -1;
  PyObject* answer = self->function ? self->function(self->self, passed) : PyObject_CallObject(self->holds, passed);
  if (tensors == NULL) Py_DECREF(passed);
  int holds = answer == NULL ? -1 : PyObject_IsTrue(answer);
  Py_XDECREF(answer);
  if (holds != 1 || self->checked) return holds;
  for (Py_ssize_t at = 0; at < self->num_tensors; at++) {
    if (address_of_known(self->driver, given[self->places[at]], at, &addresses[at]) < 0) return -1;
  }
  for (Py_ssize_t at = 0; at < self->num_gaps; at++) {
    Gap gap = self->gaps[at];
    int64_t between = (int64_t)(addresses[gap.other] - addresses[gap.one]);
    if (gap.least < between && between < gap.most) return 0;
  }
  for (Py_ssize_t at = 0; at < self->num_same; at++) {
    if (addresses[self->same[at].one] != addresses[self->same[at].other]) return 0;
  }
  return 1;
}

static PyObject* known_holds(PyObject* object, PyObject* given) {
  Known* self = (Known*)object;
  if (self->driver == NULL || !PyTuple_Check(given) || PyTuple_Size(given) != self->num_operands)
    return PyErr_Format(PyExc_TypeError, "takes a tuple of %zd operands", self->num_operands);
  PyObject* operands[MAX_OPERANDS];
  uint64_t addresses[MAX_OPERANDS];
  for (Py_ssize_t at = 0; at < self->num_operands; at++) operands[at] = PyTuple_GetItem(given, at);
  int known = is_known(self, operands, self->num_compared == self->num_operands ? given : NULL, addresses);
  return known < 0 ? NULL : PyBool_FromLong(known);
}

static PyObject* known_attach(PyObject* object, PyObject* args) {
  Known* self = (Known*)object;
  State* state = PyModule_GetState(PyType_GetModule(Py_TYPE(object)));
  PyObject *sequence, *order;
  if (state == NULL || !PyArg_ParseTuple(args, "O!O!", state->sequence_type, &sequence, &PyTuple_Type, &order))
    return NULL;
  Sequence* of = (Sequence*)sequence;
  Py_ssize_t count = PyTuple_Size(order);
  uint16_t places[MAX_OPERANDS];
  if (self->driver == NULL || of->driver != self->driver || count != given_of(of))
    return PyErr_Format(PyExc_ValueError, "another driver, or an order of %zd for %zd operands", count,
                        of->num_operands);
  for (Py_ssize_t at = 0; at < count; at++) {
    unsigned long place = PyLong_AsUnsignedLong(PyTuple_GetItem(order, at));
    if (PyErr_Occurred()) return NULL;
    if ((Py_ssize_t)place >= self->num_tensors)
      return PyErr_Format(PyExc_ValueError, "tensor %lu of %zd", place, self->num_tensors);
    places[at] = (uint16_t)place;
  }
  PyObject* before = (PyObject*)self->sequence;
  memcpy(self->order, places, (size_t)count * sizeof *places);
  Py_INCREF(sequence);
  self->sequence = of;
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

static PyObject* known_launch(PyObject* object, PyObject* given) {
  Known* self = (Known*)object;
  if (self->driver == NULL || self->checked || !PyTuple_Check(given) || PyTuple_Size(given) != self->num_operands)
    return PyErr_Format(PyExc_TypeError, "takes a tuple of %zd operands", self->num_operands);
  PyObject *operands[MAX_OPERANDS], *tensors[MAX_OPERANDS];
  uint64_t found[MAX_OPERANDS], addresses[MAX_OPERANDS];
  for (Py_ssize_t at = 0; at < self->num_operands; at++) operands[at] = PyTuple_GetItem(given, at);
  int known = is_known(self, operands, self->num_compared == self->num_operands ? given : NULL, found);
  if (known < 0) return NULL;
  Sequence* sequence = self->sequence;
  if (known == 0 || sequence == NULL) return PyLong_FromLong(known);
  Py_ssize_t count = given_of(sequence);
  for (Py_ssize_t at = 0; at < count; at++) {
    tensors[at] = operands[self->places[self->order[at]]];
    addresses[at] = found[self->order[at]];
  }
  Py_INCREF((PyObject*)sequence); /* another thread may attach a new one */
  int launched = launch_sequence(sequence, tensors, addresses);
  Py_DECREF((PyObject*)sequence);
  return launched < 0 ? NULL : PyLong_FromLong(1 + launched);
}

/* ---- Forms: sequences by the form of their operands ------------------------------------------------------------- */

typedef struct {
  Known* known;
  Sequence* sequence; /* NULL for a form that is launched otherwise */
} Form;

typedef struct {
  PyObject_HEAD
  Py_ssize_t num_forms;
  Form forms[MAX_FORMS];
} Forms;

static int forms_init(PyObject* object, PyObject* args, PyObject* named) {
  static char* names[] = {"forms", NULL};
  Forms* self = (Forms*)object;
  State* state = PyModule_GetState(PyType_GetModule(Py_TYPE(object)));
  PyObject* forms;
  if (state == NULL || !PyArg_ParseTupleAndKeywords(args, named, "O!", names, &PyTuple_Type, &forms)) return -1;
  Py_ssize_t count = PyTuple_Size(forms);
  if (self->num_forms || count < 1 || count > MAX_FORMS) {
    PyErr_Format(PyExc_ValueError, "made once, of 1 to %d forms", MAX_FORMS);
    return -1;
  }
  for (Py_ssize_t at = 0; at < count; at++) {
    Form* form = &self->forms[at];
    PyObject *pair = PyTuple_GetItem(forms, at), *known, *sequence;
    if (!PyTuple_Check(pair)) {
      PyErr_SetString(PyExc_TypeError, "a form is a Known of tensors, and a Sequence or None");
      return -1;
    }
    if (!PyArg_ParseTuple(pair, "OO", &known, &sequence)) return -1;
    Known* of = (Known*)known;
    if ((PyObject*)Py_TYPE(known) != state->known_type || of->driver == NULL || of->num_compared != of->num_operands ||
        (sequence != Py_None && (PyObject*)Py_TYPE(sequence) != state->sequence_type)) {
      PyErr_SetString(PyExc_TypeError, "a form is a Known of tensors, and a Sequence or None");
      return -1;
    }
    Py_INCREF(known);
    form->known = of;
    if (sequence != Py_None) {
      Py_INCREF(sequence);
      form->sequence = (Sequence*)sequence;
    }
    self->num_forms = at + 1;
  }
  return 0;
}

static void forms_dealloc(PyObject* object) {
  Forms* self = (Forms*)object;
  PyTypeObject* type = Py_TYPE(object);
  for (Py_ssize_t at = 0; at < self->num_forms; at++) {
    Py_XDECREF(self->forms[at].known);
    Py_XDECREF(self->forms[at].sequence);
  }
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static PyObject* forms_launch(PyObject* object, PyObject* const* given, Py_ssize_t count) {
  Forms* self = (Forms*)object;
  uint64_t addresses[MAX_OPERANDS];
  PyObject* operands = tuple_of(given, count, NULL);
  if (operands == NULL) return NULL;
  int launched = 0;
  for (Py_ssize_t at = 0; at < self->num_forms; at++) {
    Form* form = &self->forms[at];
    if (count != form->known->num_operands) continue;
    int holds = is_known(form->known, given, operands, addresses);
    if (holds < 0) launched = -1;
    if (holds == 0) continue;
    if (holds > 0 && form->sequence != NULL) {
      if (count != given_of(form->sequence)) {
        PyErr_Format(PyExc_TypeError, "%zd operands, the sequence takes others", count);
        launched = -1;
      } else {
        launched = launch_sequence(form->sequence, given, form->known->checked ? NULL : addresses);
      }
    }
    break;
  }
  Py_DECREF(operands);
  return launched < 0 ? NULL : PyBool_FromLong(launched);
}

static PyObject* forms_sequence_of(PyObject* object, PyObject* const* given, Py_ssize_t count) {
  Forms* self = (Forms*)object;
  uint64_t addresses[MAX_OPERANDS];
  for (Py_ssize_t at = 0; at < self->num_forms; at++) {
    Form* form = &self->forms[at];
    if (count != form->known->num_operands || form->known->checked || form->sequence == NULL) continue;
    int holds = is_known(form->known, given, NULL, addresses);
    if (holds < 0) return NULL;
    if (holds == 0) continue;
    Py_INCREF((PyObject*)form->sequence);
    return (PyObject*)form->sequence;
  }
  Py_RETURN_NONE;
}

/* ---- Calls: whole calls of an op, by their arguments -------------------------------------------------------------
 *
 * A call whose arguments are those of one before, but for the memory of its tensors, needs none of the op's Python:
 * what its function would look up is in a `Call`. Which calls are worth one is found out by counting those that have
 * none. */

typedef struct {
  PyObject_HEAD
  Known* known;
  int16_t sources[MAX_OPERANDS];  /* of the known call's operands: an argument, then results that are made; -1: None */
  int16_t results[MAX_RESULTS];   /* the same of what is returned */
  Py_ssize_t num_results;         /* 0: one, and no tuple */
  PyObject *made, *tick, *failed; /* functions: of each result that is made, of the count of calls, of an exception */
  PyObject* counter;              /* as of `counter_of` */
  uint64_t signature;
  Py_ssize_t num_flat;
  PyObject* constants[MAX_OPERANDS]; /* NULL for a tensor */
  uint8_t forms[MAX_OPERANDS];
  int followed_by; /* which call came after it last */
} Call;

typedef struct { /* the arguments of a call, with the tensors of a list or tuple one by one */
  PyObject* flat[MAX_OPERANDS];
  uint8_t forms[MAX_OPERANDS]; /* of an argument 0, of a list of n tensors 2n, of a tuple 2n + 1; then 0 */
  Py_ssize_t count;
  uint64_t tensors, signature;
  int lists; /* whether some are items of a list, which another thread may change */
} Arguments;

typedef struct {
  uint64_t signature;
  uint32_t count;
} Missed;

typedef struct {
  PyObject_HEAD
  Driver* driver;
  PyObject *learn, *contexts_used, *contexts, *forward; /* see `calls_init` */
  PyObject* shape;                                      /* the descriptor of a tensor's `shape` */
  descrgetfunc shape_of;
  Call* calls[MAX_CALLS];
  int num_calls, next, last; /* the one to replace next, the one that was made last */
  uint64_t cleared;          /* how often all were forgotten */
  PyObject* last_layers;     /* the Layers whose call was made last; or NULL */
  PyObject* forward_names;   /* of the module `forward`, if it is one; borrowed of it */
  Missed missed[MAX_MISSED];
} Calls;

static int read_indices(PyObject* given, Py_ssize_t least, Py_ssize_t most, int16_t* found) {
  Py_ssize_t count = PyTuple_Size(given);
  for (Py_ssize_t at = 0; at < count; at++) {
    long index = PyLong_AsLong(PyTuple_GetItem(given, at));
    if (PyErr_Occurred()) return -1;
    if (index < least || index >= most) {
      PyErr_Format(PyExc_ValueError, "index %ld of %zd", index, most);
      return -1;
    }
    found[at] = (int16_t)index;
  }
  return 0;
}

/* Count a call: by the iterator of which `tick` is the method, if it is one. -1 with an exception. */
static int count_call(PyObject* tick, PyObject* counter) {
  PyObject* count = counter ? PyIter_Next(counter) : PyObject_CallObject(tick, NULL);
  if (count == NULL) return -1;
  Py_DECREF(count);
  return 0;
}

static PyObject* counter_of(PyObject* tick) {
  PyObject* counter = PyObject_GetAttr(tick, name_self);
  PyObject* next = counter == NULL || !PyIter_Check(counter) ? NULL : PyObject_GetAttr(counter, name_next);
  int same = next != NULL && PyObject_RichCompareBool(next, tick, Py_EQ) == 1;
  Py_XDECREF(next);
  if (!same) Py_CLEAR(counter);
  PyErr_Clear();
  return counter;
}

static int call_init(PyObject* object, PyObject* args, PyObject* named) {
  static char* names[] = {"known", "sources", "results", "single", "made", "tick", "failed", NULL};
  Call* self = (Call*)object;
  State* state = PyModule_GetState(PyType_GetModule(Py_TYPE(object)));
  PyObject *known, *sources, *results, *made, *tick, *failed;
  int single;
  if (state == NULL ||
      !PyArg_ParseTupleAndKeywords(args, named, "O!O!O!pO!OO", names, state->known_type, &known, &PyTuple_Type,
                                   &sources, &PyTuple_Type, &results, &single, &PyTuple_Type, &made, &tick, &failed))
    return -1;
  Known* of = (Known*)known;
  Py_ssize_t count = PyTuple_Size(results);
  if (self->known != NULL || of->driver == NULL || of->checked || of->sequence == NULL ||
      PyTuple_Size(sources) != of->num_operands || count < 1 || count > MAX_RESULTS || (single && count != 1) ||
      PyTuple_Size(made) > MAX_RESULTS) {
    PyErr_Format(PyExc_ValueError,
                 "made once, of a known call that launches, with all its operands, for 1 to %d results", MAX_RESULTS);
    return -1;
  }
  if (read_indices(sources, -1, 2 * MAX_OPERANDS, self->sources) < 0 ||
      read_indices(results, -1, 2 * MAX_OPERANDS, self->results) < 0)
    return -1;
  self->num_results = single ? 0 : count;
  Py_INCREF(known), Py_INCREF(made), Py_INCREF(tick), Py_INCREF(failed);
  self->made = made;
  self->tick = tick;
  self->counter = counter_of(tick);
  self->failed = failed;
  self->known = of;
  return 0;
}

static void call_dealloc(PyObject* object) {
  Call* self = (Call*)object;
  PyTypeObject* type = Py_TYPE(object);
  for (Py_ssize_t at = 0; at < self->num_flat; at++) Py_XDECREF(self->constants[at]);
  Py_XDECREF(self->known);
  Py_XDECREF(self->made);
  Py_XDECREF(self->tick);
  Py_XDECREF(self->counter);
  Py_XDECREF(self->failed);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static int calls_init(PyObject* object, PyObject* args, PyObject* named) {
  static char* names[] = {"driver", "learn", "contexts_used", "contexts", "forward", NULL};
  Calls* self = (Calls*)object;
  State* state = PyModule_GetState(PyType_GetModule(Py_TYPE(object)));
  PyObject *driver, *learn, *used, *contexts, *forward;
  if (state == NULL || !PyArg_ParseTupleAndKeywords(args, named, "O!OO!OO", names, state->driver_type, &driver, &learn,
                                                    &PyList_Type, &used, &contexts, &forward))
    return -1;
  if (self->driver != NULL || ((Driver*)driver)->tensor == NULL) {
    PyErr_SetString(PyExc_TypeError, "made once, with a driver that is");
    return -1;
  }
  self->shape = PyObject_GetAttr((PyObject*)((Driver*)driver)->tensor, name_shape);
  if (self->shape == NULL) return -1;
  self->shape_of = (descrgetfunc)PyType_GetSlot(Py_TYPE(self->shape), Py_tp_descr_get);
  Py_INCREF(driver), Py_INCREF(learn), Py_INCREF(used), Py_INCREF(contexts), Py_INCREF(forward);
  self->learn = learn;
  self->contexts_used = used;
  self->contexts = contexts;
  self->forward = forward;
  self->forward_names = PyModule_Check(forward) ? PyModule_GetDict(forward) : NULL;
  self->driver = (Driver*)driver;
  return 0;
}

static void forget_calls(Calls* self) {
  PyObject* layers = self->last_layers;
  self->cleared++;
  self->last_layers = NULL;
  Py_XDECREF(layers);
  while (self->num_calls) {
    Call* last = self->calls[--self->num_calls];
    self->calls[self->num_calls] = NULL;
    Py_DECREF((PyObject*)last);
  }
}

static void calls_dealloc(PyObject* object) {
  Calls* self = (Calls*)object;
  PyTypeObject* type = Py_TYPE(object);
  forget_calls(self);
  Py_XDECREF(self->driver);
  Py_XDECREF(self->learn);
  Py_XDECREF(self->contexts_used);
  Py_XDECREF(self->contexts);
  Py_XDECREF(self->forward);
  Py_XDECREF(self->shape);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static uint64_t mixed(uint64_t signature, uint64_t more) {
  signature = (signature ^ more) * 0x9E3779B97F4A7C15ULL;
  return signature ^ (signature >> 29);
}

/* Whether two arguments that are no tensors are one value. */
static int same_constant(PyObject* one, PyObject* other) {
  if (one == other) return 1;
  if (Py_TYPE(one) != Py_TYPE(other)) return 0;
  if (PyFloat_CheckExact(one)) { /* 0.0 is not -0.0 */
    double first = PyFloat_AsDouble(one), second = PyFloat_AsDouble(other);
    return memcmp(&first, &second, sizeof first) == 0;
  }
  if (PyLong_CheckExact(one) || PyUnicode_CheckExact(one)) return PyObject_RichCompareBool(one, other, Py_EQ) == 1;
  if (!PyTuple_CheckExact(one) || PyTuple_Size(one) != PyTuple_Size(other)) return 0;
  for (Py_ssize_t at = 0; at < PyTuple_Size(one); at++) {
    if (!same_constant(PyTuple_GetItem(one, at), PyTuple_GetItem(other, at))) return 0;
  }
  return 1;
}

static int flatten(Calls* self, PyObject* const* given, Py_ssize_t count, Arguments* found) {
  PyTypeObject* tensor = self->driver->tensor;
  found->count = 0;
  found->tensors = 0;
  found->lists = 0;
  for (Py_ssize_t at = 0; at < count; at++) {
    PyObject* one = given[at];
    int list = PyList_CheckExact(one);
    Py_ssize_t size = list ? PyList_Size(one) : PyTuple_CheckExact(one) ? PyTuple_Size(one) : 0;
    PyObject* first = size == 0 ? NULL : list ? PyList_GetItem(one, 0) : PyTuple_GetItem(one, 0);
    int several = first != NULL && PyObject_TypeCheck(first, tensor);
    Py_ssize_t items = several ? size : 1;
    if (found->count + items > MAX_OPERANDS) return 0;
    found->lists |= several && list;
    for (Py_ssize_t of = 0; of < items; of++) {
      PyObject* item = !several ? one : list ? PyList_GetItem(one, of) : PyTuple_GetItem(one, of);
      Py_ssize_t place = found->count++;
      found->flat[place] = item;
      found->forms[place] = (uint8_t)(several && of == 0 ? 2 * size + !list : 0);
      if (PyObject_TypeCheck(item, tensor)) found->tensors |= 1ULL << place;
      else if (several) return 0;
    }
  }
  return 1;
}

/* Find the signature of arguments, which calls that are alike have in common; 0 if there is none. */
static int sign(Calls* self, Arguments* found) {
  uint64_t signature = mixed((uint64_t)found->count, found->tensors);
  for (Py_ssize_t at = 0; at < found->count; at++) {
    PyObject* one = found->flat[at];
    Py_hash_t hash;
    if (found->tensors & (1ULL << at)) {
      PyObject* shape = self->shape_of ? self->shape_of(self->shape, one, (PyObject*)Py_TYPE(one))
                                       : PyObject_GetAttr(one, name_shape);
      hash = shape == NULL ? -1 : PyObject_Hash(shape);
      Py_XDECREF(shape);
    } else if (one == Py_None) {
      continue;
    } else {
      hash = PyObject_Hash(one);
    }
    if (hash == -1 && PyErr_Occurred()) { /* a nested tensor, a list */
      PyErr_Clear();
      return 0;
    }
    signature = mixed(signature, (uint64_t)hash + (uint64_t)at);
  }
  found->signature = signature;
  return 1;
}

static int is_call(const Call* call, const Arguments* given) {
  if (call->num_flat != given->count) return 0;
  for (Py_ssize_t at = 0; at < given->count; at++) {
    int tensor = (given->tensors >> at) & 1;
    if (tensor != (call->constants[at] == NULL) || call->forms[at] != given->forms[at]) return 0;
    if (!tensor && !same_constant(call->constants[at], given->flat[at])) return 0;
  }
  return 1;
}

/* Let Python see the exception of a launch; what it raises takes its place. */
static void tell(PyObject* failed) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != NULL) PyException_SetTraceback(value, trace);
  PyObject* done = PyObject_CallFunctionObjArgs(failed, value, NULL);
  if (done != NULL) {
    Py_DECREF(done);
    PyErr_Restore(type, value, trace);
    return;
  }
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
}

static PyObject* argument_of(const Arguments* given, PyObject* const* made, int16_t index) {
  if (index < 0) return Py_None;
  return index < given->count ? given->flat[index] : made[index - given->count];
}

static void hold(const Arguments* given) {
  for (Py_ssize_t at = 0; given->lists && at < given->count; at++) Py_INCREF(given->flat[at]);
}

static void let_go(const Arguments* given) {
  for (Py_ssize_t at = 0; given->lists && at < given->count; at++) Py_DECREF(given->flat[at]);
}

/* What a call returns, launched: NULL with an exception, or without one if it is not this call or launched otherwise.
 */
static PyObject* call_again(Call* self, const Arguments* given) {
  PyObject *made[MAX_RESULTS] = {NULL}, *operands[MAX_OPERANDS], *tensors[MAX_OPERANDS], *result = NULL;
  uint64_t found[MAX_OPERANDS], addresses[MAX_OPERANDS];
  Known* known = self->known;
  Py_ssize_t num_made = PyTuple_Size(self->made);
  int launched = 0;
  for (Py_ssize_t at = 0; at < num_made; at++) {
    made[at] = PyObject_CallObject(PyTuple_GetItem(self->made, at), NULL);
    if (made[at] == NULL) goto done;
  }
  for (Py_ssize_t at = 0; at < known->num_operands; at++) operands[at] = argument_of(given, made, self->sources[at]);
  launched = is_known(known, operands, NULL, found);
  Sequence* sequence = known->sequence;
  if (launched == 1 && sequence != NULL) {
    Py_ssize_t count = given_of(sequence);
    for (Py_ssize_t at = 0; at < count; at++) {
      tensors[at] = operands[known->places[known->order[at]]];
      addresses[at] = found[known->order[at]];
    }
    Py_INCREF((PyObject*)sequence); /* another thread may attach a new one */
    launched = launch_sequence(sequence, tensors, addresses);
    Py_DECREF((PyObject*)sequence);
    if (launched < 0) tell(self->failed);
  }
  if (launched == 1) {
    if (count_call(self->tick, self->counter) < 0) goto done;
    if (self->num_results == 0) {
      result = argument_of(given, made, self->results[0]);
      Py_INCREF(result);
    } else {
      result = PyTuple_New(self->num_results);
      for (Py_ssize_t at = 0; result != NULL && at < self->num_results; at++) {
        PyObject* one = argument_of(given, made, self->results[at]);
        Py_INCREF(one);
        PyTuple_SetItem(result, at, one);
      }
    }
  }
done:
  for (Py_ssize_t at = 0; at < num_made; at++) Py_XDECREF(made[at]);
  return result;
}

/* Whether nothing but its arguments decides on a call: it is outside of all contexts, and of forward differentiation.
 */
static int undisturbed(Calls* self) {
  if (PyList_Size(self->contexts_used) > 0) {
    PyObject* contexts = PyObject_CallObject(self->contexts, NULL);
    int inside = contexts == NULL ? -1 : PyObject_IsTrue(contexts);
    Py_XDECREF(contexts);
    if (inside != 0) return inside < 0 ? -1 : 0;
  }
  PyObject* level = self->forward_names == NULL ? NULL : PyDict_GetItemWithError(self->forward_names, name_level);
  if (level != NULL) Py_INCREF(level);
  else if (!PyErr_Occurred()) level = PyObject_GetAttr(self->forward, name_level);
  long now = level == NULL ? -1 : PyLong_AsLong(level);
  Py_XDECREF(level);
  return PyErr_Occurred() ? -1 : now < 0;
}

/* The result of one of the calls, if the arguments are of it, as of `call_again`. */
static PyObject* try_call(Calls* self, int at, const Arguments* given) {
  Call* call = at < self->num_calls ? self->calls[at] : NULL;
  if (call == NULL || !is_call(call, given)) return NULL;
  Py_INCREF((PyObject*)call); /* another thread may forget it */
  PyObject* result = call_again(call, given);
  Py_DECREF((PyObject*)call);
  if (result == NULL) return NULL;
  if (self->last < self->num_calls) self->calls[self->last]->followed_by = at;
  self->last = at;
  return result;
}

/* How often no call was found for a signature, this time included. One that was seldom looked for may be forgotten. */
static uint32_t count_missed(Calls* self, uint64_t signature) {
  Missed* seldom = NULL;
  for (uint64_t at = signature; at < signature + 8; at++) {
    Missed* missed = &self->missed[at % MAX_MISSED];
    if (missed->count && missed->signature == signature) return ++missed->count;
    if (seldom == NULL || missed->count < seldom->count) seldom = missed;
  }
  *seldom = (Missed){signature, 1};
  return 1;
}

/* The result of the call that the arguments are of; NULL with an exception, or if there is none.
 *
 * Layers make the same calls in turn, so what followed the last call is tried before a signature is computed. `times`
 * is how often there was none with this signature. */
static PyObject* find_call(Calls* self, Arguments* given, uint32_t* times) {
  int guess = self->last < self->num_calls ? self->calls[self->last]->followed_by : self->num_calls;
  PyObject* result = try_call(self, guess, given);
  if (result != NULL || PyErr_Occurred() || !sign(self, given)) return result;
  for (int at = 0; at < self->num_calls; at++) {
    if (at == guess || self->calls[at]->signature != given->signature) continue;
    result = try_call(self, at, given);
    if (result != NULL || PyErr_Occurred()) return result;
  }
  *times = count_missed(self, given->signature);
  return NULL;
}

static PyObject* calls_again(PyObject* object, PyObject* const* given, Py_ssize_t count) {
  Calls* self = (Calls*)object;
  Arguments arguments;
  uint32_t times = 0;
  if (self->driver == NULL) return PyErr_Format(PyExc_TypeError, "was not initialised");
  int alone = undisturbed(self);
  if (alone < 0) return NULL;
  if (!alone || !flatten(self, given, count, &arguments)) Py_RETURN_NONE;
  hold(&arguments);
  PyObject* result = find_call(self, &arguments, &times);
  let_go(&arguments);
  if (result != NULL || PyErr_Occurred()) return result;
  if (times < LEARNED_AFTER || (times & (times - 1))) Py_RETURN_NONE;
  PyObject* call = tuple_of(given, count, NULL);
  result = call == NULL ? NULL : PyObject_CallObject(self->learn, call);
  Py_XDECREF(call);
  return result;
}

static PyObject* calls_add(PyObject* object, PyObject* args) {
  Calls* self = (Calls*)object;
  State* state = PyModule_GetState(PyType_GetModule(Py_TYPE(object)));
  PyObject *given, *of, *flat[MAX_OPERANDS];
  Arguments arguments;
  if (state == NULL || !PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &given, state->call_type, &of)) return NULL;
  Call* call = (Call*)of;
  Py_ssize_t count = PyTuple_Size(given);
  if (self->driver == NULL || call->known == NULL || call->num_flat || count > MAX_OPERANDS)
    return PyErr_Format(PyExc_ValueError, "takes a Call once");
  for (Py_ssize_t at = 0; at < count; at++) flat[at] = PyTuple_GetItem(given, at);
  if (!flatten(self, flat, count, &arguments) || !sign(self, &arguments))
    return PyErr_Format(PyExc_ValueError, "arguments of no repeated call");
  Py_ssize_t most = arguments.count + PyTuple_Size(call->made);
  for (Py_ssize_t at = 0; at < call->known->num_operands + (call->num_results ? call->num_results : 1); at++) {
    Py_ssize_t result = at - call->known->num_operands;
    if ((result < 0 ? call->sources[at] : call->results[result]) >= most)
      return PyErr_Format(PyExc_ValueError, "a source beyond the %zd arguments and results", most);
  }
  call->signature = arguments.signature;
  call->num_flat = arguments.count;
  for (Py_ssize_t at = 0; at < arguments.count; at++) {
    call->forms[at] = arguments.forms[at];
    call->constants[at] = (arguments.tensors >> at) & 1 ? NULL : arguments.flat[at];
    Py_XINCREF(call->constants[at]);
  }
  Py_INCREF(of);
  if (self->num_calls < MAX_CALLS) {
    self->calls[self->num_calls++] = call;
    Py_RETURN_NONE;
  }
  Call* before = self->calls[self->next];
  self->calls[self->next] = call;
  self->next = (self->next + 1) % MAX_CALLS;
  Py_DECREF((PyObject*)before);
  Py_RETURN_NONE;
}

static PyObject* calls_flat(PyObject* object, PyObject* const* given, Py_ssize_t count) {
  Calls* self = (Calls*)object;
  Arguments arguments;
  if (self->driver == NULL || !flatten(self, given, count, &arguments)) Py_RETURN_NONE;
  return tuple_of(arguments.flat, arguments.count, NULL);
}

static PyObject* calls_clear(PyObject* object, PyObject* nothing) {
  (void)nothing;
  forget_calls((Calls*)object);
  memset(((Calls*)object)->missed, 0, sizeof((Calls*)object)->missed);
  Py_RETURN_NONE;
}

/* ---- Layers: calls of an engine's layers ---------------------------------------------------------------------------
 *
 * The layers of an engine's step differ in few tensors. Those of a layer stay the same from step to step, those of a
 * step from layer to layer: their form and addresses are found once. So each call looks at two tensors, the queries and
 * the destination. Between two calls the engine runs much else, so what a call reads is in no near cache: the lines are
 * few, and all are asked for before the first is waited for. */

typedef struct { /* a layer, with tensors that nobody changes as long as it has them */
  PyObject_HEAD
  Calls* calls;
  PyObject *launches, *cache; /* Layers by forms of steps, of layers with the same values; what the tensors are of */
  Py_ssize_t num_tensors;
  PyObject* form; /* the Known that let them through last; or NULL */
  uint64_t addresses[MAX_KEPT];
  PyObject* tensors[MAX_KEPT];
} Layer;

typedef struct {
  PyObject_HEAD
  Calls* calls;
  uint64_t cleared; /* of `calls`, when this was made */
  Sequence* sequence;
  Known *two, *of_layer, *of_step;   /* forms of queries and destination, of a layer's and of a step's tensors */
  PyObject *tick, *counter, *failed; /* as of a Call */
  PyObject *launches, *form;         /* where it is, and under which key it was found last */
  Py_ssize_t num_operands, num_gaps;
  Gap* gaps;                      /* of the sequence's operands */
  uint16_t sources[MAX_OPERANDS]; /* of those: queries, destination, then the layer's, then the step's */
  uint64_t addresses[MAX_KEPT];   /* of the last step's */
  PyObject* step[MAX_KEPT];       /* its tensors; NULL before the first */
} Layers;

static int layer_init(PyObject* object, PyObject* args, PyObject* named) {
  static char* names[] = {"calls", "launches", "cache", "tensors", NULL};
  Layer* self = (Layer*)object;
  State* state = PyModule_GetState(PyType_GetModule(Py_TYPE(object)));
  PyObject *calls, *launches, *cache, *tensors;
  if (state == NULL || !PyArg_ParseTupleAndKeywords(args, named, "O!O!OO!", names, state->calls_type, &calls,
                                                    &PyDict_Type, &launches, &cache, &PyTuple_Type, &tensors))
    return -1;
  Py_ssize_t count = PyTuple_Size(tensors);
  if (self->calls != NULL || ((Calls*)calls)->driver == NULL || count < 1 || count > MAX_KEPT) {
    PyErr_Format(PyExc_ValueError, "made once, of calls and 1 to %d tensors", MAX_KEPT);
    return -1;
  }
  for (Py_ssize_t at = 0; at < count; at++) {
    self->tensors[at] = PyTuple_GetItem(tensors, at);
    Py_INCREF(self->tensors[at]);
  }
  Py_INCREF(calls), Py_INCREF(launches), Py_INCREF(cache);
  self->num_tensors = count;
  self->launches = launches;
  self->cache = cache;
  self->calls = (Calls*)calls;
  return 0;
}

static void layer_dealloc(PyObject* object) {
  Layer* self = (Layer*)object;
  PyTypeObject* type = Py_TYPE(object);
  for (Py_ssize_t at = 0; at < self->num_tensors; at++) Py_XDECREF(self->tensors[at]);
  Py_XDECREF(self->form);
  Py_XDECREF(self->launches);
  Py_XDECREF(self->cache);
  Py_XDECREF((PyObject*)self->calls);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

/* Whether a layer's tensors have a form: 1, 0, or -1 with an exception. */
static int has_form(Layer* kept, Known* form) {
  if (kept->form == (PyObject*)form) return 1;
  if (kept->num_tensors != form->num_operands) return 0;
  PyObject* before = kept->form;
  kept->form = NULL; /* the addresses are of no form, unless it holds */
  int holds = is_known(form, kept->tensors, NULL, kept->addresses);
  if (holds == 1) {
    Py_INCREF((PyObject*)form);
    kept->form = (PyObject*)form;
  }
  Py_XDECREF(before);
  return holds;
}

/* The same of a step's tensors, which are those of the last call for all layers but the first. */
static int is_of_step(Layers* self, PyObject* const* tensors) {
  Py_ssize_t count = self->of_step->num_operands, same = 0;
  while (same < count && tensors[same] == self->step[same]) same++;
  if (same == count) return 1;
  uint64_t addresses[MAX_KEPT];
  int holds = is_known(self->of_step, tensors, NULL, addresses);
  if (holds != 1) return holds;
  PyObject* before[MAX_KEPT];
  memcpy(self->addresses, addresses, sizeof addresses);
  for (Py_ssize_t at = 0; at < count; at++) {
    before[at] = self->step[at];
    Py_INCREF(tensors[at]);
    self->step[at] = tensors[at];
  }
  for (Py_ssize_t at = 0; at < count; at++) Py_XDECREF(before[at]);
  return 1;
}

static int layers_init(PyObject* object, PyObject* args, PyObject* named) {
  static char* names[] = {"calls",   "sequence", "two",  "of_layer", "of_step",
                          "sources", "apart",    "tick", "failed",   NULL};
  Layers* self = (Layers*)object;
  State* state = PyModule_GetState(PyType_GetModule(Py_TYPE(object)));
  PyObject *calls, *sequence, *known[3], *sources, *apart, *tick, *failed;
  if (state == NULL || !PyArg_ParseTupleAndKeywords(args, named, "O!O!O!O!O!O!O!OO", names, state->calls_type, &calls,
                                                    state->sequence_type, &sequence, state->known_type, &known[0],
                                                    state->known_type, &known[1], state->known_type, &known[2],
                                                    &PyTuple_Type, &sources, &PyTuple_Type, &apart, &tick, &failed))
    return -1;
  Calls* of = (Calls*)calls;
  Sequence* launches = (Sequence*)sequence;
  Py_ssize_t count = PyTuple_Size(sources), most = 0;
  int right =
      self->calls == NULL && of->driver != NULL && launches->driver == of->driver && count == given_of(launches);
  for (int at = 0; at < 3; at++) {
    Known* form = (Known*)known[at];
    right &= form->driver == of->driver && !form->checked && form->num_compared == form->num_operands;
    right &= at ? form->num_operands <= MAX_KEPT : form->num_operands == 2;
    most += form->num_operands;
  }
  if (!right) {
    PyErr_SetString(PyExc_ValueError,
                    "made once, of calls, a sequence with a source of each operand, and forms of tensors, the first of "
                    "two, all of one driver");
    return -1;
  }
  int16_t found[MAX_OPERANDS];
  if (read_indices(sources, 0, most, found) < 0 || read_pairs(apart, 1, count, &self->gaps, &self->num_gaps) < 0)
    return -1;
  for (Py_ssize_t at = 0; at < count; at++) self->sources[at] = (uint16_t)found[at];
  Py_INCREF(calls), Py_INCREF(sequence), Py_INCREF(tick), Py_INCREF(failed);
  for (int at = 0; at < 3; at++) Py_INCREF(known[at]);
  self->num_operands = count;
  self->sequence = launches;
  self->two = (Known*)known[0], self->of_layer = (Known*)known[1], self->of_step = (Known*)known[2];
  self->tick = tick, self->failed = failed;
  self->counter = counter_of(tick);
  self->cleared = of->cleared;
  self->calls = of;
  return 0;
}

static void layers_dealloc(PyObject* object) {
  Layers* self = (Layers*)object;
  PyTypeObject* type = Py_TYPE(object);
  free(self->gaps);
  for (int at = 0; at < MAX_KEPT; at++) Py_XDECREF(self->step[at]);
  Py_XDECREF((PyObject*)self->calls);
  Py_XDECREF((PyObject*)self->sequence);
  Py_XDECREF((PyObject*)self->two);
  Py_XDECREF((PyObject*)self->of_layer);
  Py_XDECREF((PyObject*)self->of_step);
  Py_XDECREF(self->tick);
  Py_XDECREF(self->counter);
  Py_XDECREF(self->failed);
  Py_XDECREF(self->form);
  Py_XDECREF(self->launches);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

/* 1: launched, 0: this is another call, or it has to be launched otherwise, -1: an exception. */
static int launch_layer(Layers* self, PyObject* const* given, Layer* layer, PyObject* const* step) {
  uint64_t all[2 + 2 * MAX_KEPT], addresses[MAX_OPERANDS];
  int right = self->calls->cleared == self->cleared ? undisturbed(self->calls) : 0;
  if (right == 1) right = has_form(layer, self->of_layer);
  if (right == 1) right = is_of_step(self, step);
  if (right == 1) right = is_known(self->two, given, NULL, all);
  if (right != 1) return right;
  memcpy(all + 2, layer->addresses, (size_t)layer->num_tensors * sizeof *all);
  memcpy(all + 2 + layer->num_tensors, self->addresses, (size_t)self->of_step->num_operands * sizeof *all);
  for (Py_ssize_t at = 0; at < self->num_operands; at++) addresses[at] = all[self->sources[at]];
  for (Py_ssize_t at = 0; at < self->num_gaps; at++) {
    Gap gap = self->gaps[at];
    int64_t between = (int64_t)(addresses[gap.other] - addresses[gap.one]);
    if (gap.least < between && between < gap.most) return 0;
  }
  int launched = launch_sequence(self->sequence, NULL, addresses);
  if (launched < 0) tell(self->failed);
  if (launched != 1) return launched;
  return count_call(self->tick, self->counter) < 0 ? -1 : 1;
}

/* The calls of the layer's values for a form of steps, borrowed of `calls`; NULL with an exception, or if there are
 * none. Most calls are of the same form as that of the layer before. */
static Layers* layers_of(Layer* self, PyObject* form) {
  Layers* last = (Layers*)self->calls->last_layers;
  if (last != NULL && last->form == form && last->launches == self->launches) return last;
  PyObject* found = PyDict_GetItemWithError(self->launches, form);
  if (found == NULL) return NULL;
  State* state = PyModule_GetState(PyType_GetModule(Py_TYPE((PyObject*)self)));
  Layers* layers = (Layers*)found;
  if (state == NULL || (PyObject*)Py_TYPE(found) != state->layers_type) {
    PyErr_SetString(PyExc_TypeError, "a layer has Layers by forms");
    return NULL;
  }
  if (layers->calls != self->calls) return NULL;
  PyObject *before = layers->form, *place = layers->launches;
  Py_INCREF(form), Py_INCREF(found), Py_INCREF(self->launches);
  layers->form = form;
  layers->launches = self->launches; /* a cycle, until that is cleared */
  self->calls->last_layers = found;
  Py_XDECREF(before);
  Py_XDECREF(place);
  Py_XDECREF((PyObject*)last);
  return layers;
}

static PyObject* layer_launch(PyObject* object, PyObject* const* given, Py_ssize_t count) {
  Layer* self = (Layer*)object;
  if (self->calls == NULL || count < 4)
    return PyErr_Format(PyExc_TypeError, "takes queries, a destination, a cache, a form, and the tensors of a step");
  if (given[2] != self->cache) Py_RETURN_FALSE;
  Layers* layers = layers_of(self, given[3]);
  if (layers == NULL) return PyErr_Occurred() ? NULL : PyBool_FromLong(0);
  if (count != 4 + layers->of_step->num_operands) Py_RETURN_FALSE;
  Py_INCREF(object), Py_INCREF((PyObject*)layers); /* another thread may forget them */
  int launched = launch_layer(layers, given, self, given + 4);
  Py_DECREF(object), Py_DECREF((PyObject*)layers);
  return launched < 0 ? NULL : PyBool_FromLong(launched);
}

/* ---- The module -------------------------------------------------------------------------------------------------- */

static PyMethodDef driver_methods[] = {
    {"graph_counts", driver_graph_counts, METH_NOARGS,
     "graph_counts(): graphs of sequences: how many there are, of how many kernels, were made, launched, evicted and refused, updates of their "
     "nodes, and the driver's status of the last refusal."},
    {NULL, NULL, 0, NULL}};
static PyMethodDef kernel_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))kernel_launch, METH_FASTCALL,
     "launch(grid, *arguments): launch on the device's current stream. False, with nothing launched, if hooks of a "
     "profiler are set."},
    {"packed", (PyCFunction)(void (*)(void))kernel_packed, METH_FASTCALL,
     "packed(*arguments): the bytes of each parameter that a launch would pass."},
    {NULL, NULL, 0, NULL}};
static PyMethodDef sequence_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))sequence_launch, METH_FASTCALL,
     "launch(*operands): make all launches with these tensors. False, with nothing launched, if hooks of a profiler are "
     "set, another device is current, an operand that has to begin at a multiple of 16 bytes does not, the word at "
     "`zero` is not zero, or that at `stream` not the current stream."},
    {"close", sequence_close, METH_NOARGS, "close(): from now on launch nothing, and be False."},
    {"closed", sequence_closed, METH_NOARGS, "closed(): whether it was."},
    {NULL, NULL, 0, NULL}};

static PyMethodDef forms_methods[] = {
    {"sequence_of", (PyCFunction)(void (*)(void))forms_sequence_of, METH_FASTCALL,
     "sequence_of(*operands): the sequence of the form that the operands have; None if there is none."},
    {"launch", (PyCFunction)(void (*)(void))forms_launch, METH_FASTCALL,
     "launch(*operands): make the launches of the form that the operands have. False, with nothing launched, if they have "
     "none of the forms, or one that is launched otherwise."},
    {NULL, NULL, 0, NULL}};

static PyMethodDef known_methods[] = {
    {"holds", known_holds, METH_O,
     "holds(operands): whether the tensors of a tuple have the form, are not nested and lie apart, and the others are "
     "None."},
    {"attach", known_attach, METH_VARARGS,
     "attach(sequence, order): what `launch` launches; the operands of the sequence are these of the tensors."},
    {"launch", known_launch, METH_O,
     "launch(operands): 0 unless `holds`; 1 if nothing is attached, or it has to be launched otherwise; 2 if launched."},
    {NULL, NULL, 0, NULL}};

static PyMethodDef calls_methods[] = {
    {"again", (PyCFunction)(void (*)(void))calls_again, METH_FASTCALL,
     "again(*arguments): launch a call like one that was added, and what it returns; else None. Some of the calls that "
     "come again are made by `learn`."},
    {"add", calls_add, METH_VARARGS, "add(arguments, call): let calls with arguments like these be this one."},
    {"flat", (PyCFunction)(void (*)(void))calls_flat, METH_FASTCALL,
     "flat(*arguments): the arguments as the sources of a Call count them; None if there are too many."},
    {"clear", calls_clear, METH_NOARGS, "clear(): forget all calls."},
    {NULL, NULL, 0, NULL}};

static PyMethodDef layer_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))layer_launch, METH_FASTCALL,
     "launch(queries, destination, cache, form, *step): whether a call was made; all but the form are tensors."},
    {NULL, NULL, 0, NULL}};

#define SLOT(id, value) {id, (void*)(value)}
static PyType_Slot driver_slots[] = {SLOT(Py_tp_init, driver_init),
                                     SLOT(Py_tp_dealloc, driver_dealloc),
                                     SLOT(Py_tp_methods, driver_methods),
                                     SLOT(Py_tp_doc, "Functions of the CUDA driver and of torch."),
                                     {0, NULL}};
static PyType_Slot kernel_slots[] = {SLOT(Py_tp_init, kernel_init),
                                     SLOT(Py_tp_dealloc, kernel_dealloc),
                                     SLOT(Py_tp_methods, kernel_methods),
                                     SLOT(Py_tp_doc, "A compiled kernel on one device."),
                                     {0, NULL}};
static PyType_Slot sequence_slots[] = {SLOT(Py_tp_init, sequence_init),
                                       SLOT(Py_tp_dealloc, sequence_dealloc),
                                       SLOT(Py_tp_methods, sequence_methods),
                                       SLOT(Py_tp_doc, "Launches that differ in their tensors only."),
                                       {0, NULL}};
static PyType_Slot forms_slots[] = {SLOT(Py_tp_init, forms_init),
                                    SLOT(Py_tp_dealloc, forms_dealloc),
                                    SLOT(Py_tp_methods, forms_methods),
                                    SLOT(Py_tp_doc, "Sequences by the form of their operands."),
                                    {0, NULL}};
static PyType_Slot known_slots[] = {SLOT(Py_tp_init, known_init),
                                    SLOT(Py_tp_dealloc, known_dealloc),
                                    SLOT(Py_tp_methods, known_methods),
                                    SLOT(Py_tp_doc, "The form of a call that its checks let through."),
                                    {0, NULL}};
static PyType_Slot call_slots[] = {SLOT(Py_tp_init, call_init),
                                   SLOT(Py_tp_dealloc, call_dealloc),
                                   SLOT(Py_tp_doc, "A call that launches a known one."),
                                   {0, NULL}};
static PyType_Slot calls_slots[] = {SLOT(Py_tp_init, calls_init),
                                    SLOT(Py_tp_dealloc, calls_dealloc),
                                    SLOT(Py_tp_methods, calls_methods),
                                    SLOT(Py_tp_doc, "Whole calls of an op."),
                                    {0, NULL}};
static PyType_Slot layer_slots[] = {SLOT(Py_tp_init, layer_init),
                                    SLOT(Py_tp_dealloc, layer_dealloc),
                                    SLOT(Py_tp_methods, layer_methods),
                                    SLOT(Py_tp_doc, "A layer of an engine, with its tensors."),
                                    {0, NULL}};
static PyType_Slot layers_slots[] = {SLOT(Py_tp_init, layers_init),
                                     SLOT(Py_tp_dealloc, layers_dealloc),
                                     SLOT(Py_tp_doc, "Calls of layers that differ in few tensors."),
                                     {0, NULL}};
static PyType_Spec driver_spec = {"kernelhub._launch.Driver", sizeof(Driver), 0, Py_TPFLAGS_DEFAULT, driver_slots};
static PyType_Spec kernel_spec = {"kernelhub._launch.Kernel", sizeof(Kernel), 0, Py_TPFLAGS_DEFAULT, kernel_slots};
static PyType_Spec sequence_spec = {"kernelhub._launch.Sequence", sizeof(Sequence), 0, Py_TPFLAGS_DEFAULT,
                                    sequence_slots};
static PyType_Spec forms_spec = {"kernelhub._launch.Forms", sizeof(Forms), 0, Py_TPFLAGS_DEFAULT, forms_slots};

static PyType_Spec known_spec = {"kernelhub._launch.Known", sizeof(Known), 0, Py_TPFLAGS_DEFAULT, known_slots};

static PyType_Spec call_spec = {"kernelhub._launch.Call", sizeof(Call), 0, Py_TPFLAGS_DEFAULT, call_slots};
static PyType_Spec calls_spec = {"kernelhub._launch.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT, calls_slots};
static PyType_Spec layer_spec = {"kernelhub._launch.Layer", sizeof(Layer), 0, Py_TPFLAGS_DEFAULT, layer_slots};
static PyType_Spec layers_spec = {"kernelhub._launch.Layers", sizeof(Layers), 0, Py_TPFLAGS_DEFAULT, layers_slots};

static int add_type(PyObject* module, const char* name, PyType_Spec* spec, PyObject** kept) {
  PyObject* type = PyType_FromModuleAndSpec(module, spec, NULL);
  if (type == NULL) return -1;
  *kept = type; /* the module's state owns this reference */
  Py_INCREF(type);
  if (PyModule_AddObject(module, name, type) < 0) {
    Py_DECREF(type);
    return -1;
  }
  return 0;
}

static int run_module(PyObject* module) {
  State* state = PyModule_GetState(module);
  static const struct {
    PyObject** name;
    const char* text;
  } interned[] = {{&name_enter, "launch_enter_hook"},
                  {&name_leave, "launch_exit_hook"},
                  {&name_calls, "calls"},
                  {&name_base, "base"},
                  {&name_shape, "shape"},
                  {&name_strides, "strides"},
                  {&name_padding, "padding"},
                  {&name_nested, "is_nested"},
                  {&name_level, "_current_level"},
                  {&name_self, "__self__"},
                  {&name_next, "__next__"},
                  {&name_names, "__dict__"}};
  for (size_t at = 0; at < sizeof interned / sizeof *interned; at++) {
    if (*interned[at].name == NULL) *interned[at].name = PyUnicode_InternFromString(interned[at].text);
    if (*interned[at].name == NULL) return -1;
  }
  if (add_type(module, "Driver", &driver_spec, &state->driver_type) < 0 ||
      add_type(module, "Kernel", &kernel_spec, &state->kernel_type) < 0 ||
      add_type(module, "Sequence", &sequence_spec, &state->sequence_type) < 0 ||
      add_type(module, "Forms", &forms_spec, &state->forms_type) < 0 ||
      add_type(module, "Known", &known_spec, &state->known_type) < 0 ||
      add_type(module, "Call", &call_spec, &state->call_type) < 0 ||
      add_type(module, "Calls", &calls_spec, &state->calls_type) < 0 ||
      add_type(module, "Layer", &layer_spec, &state->layer_type) < 0 ||
      add_type(module, "Layers", &layers_spec, &state->layers_type) < 0)
    return -1;
  if (PyModule_AddIntConstant(module, "MAX_PARAMETERS", MAX_PARAMETERS) < 0 ||
      PyModule_AddIntConstant(module, "MAX_STEPS", MAX_STEPS) < 0 ||
      PyModule_AddIntConstant(module, "MAX_FORMS", MAX_FORMS) < 0 ||
      PyModule_AddIntConstant(module, "MAX_OPERANDS", MAX_OPERANDS) < 0)
    return -1;
  return PyModule_AddIntConstant(module, "VERSION", 12);
}

static int clear_module(PyObject* module) {
  State* state = PyModule_GetState(module);
  Py_CLEAR(state->driver_type);
  Py_CLEAR(state->kernel_type);
  Py_CLEAR(state->sequence_type);
  Py_CLEAR(state->forms_type);
  Py_CLEAR(state->known_type);
  Py_CLEAR(state->call_type);
  Py_CLEAR(state->calls_type);
  Py_CLEAR(state->layer_type);
  Py_CLEAR(state->layers_type);
  return 0;
}

static int traverse_module(PyObject* module, visitproc visit, void* arg) {
  State* state = PyModule_GetState(module);
  Py_VISIT(state->driver_type);
  Py_VISIT(state->kernel_type);
  Py_VISIT(state->sequence_type);
  Py_VISIT(state->forms_type);
  Py_VISIT(state->known_type);
  Py_VISIT(state->call_type);
  Py_VISIT(state->calls_type);
  Py_VISIT(state->layer_type);
  Py_VISIT(state->layers_type);
  return 0;
}

static void free_module(void* module) { clear_module((PyObject*)module); }

static PyObject* after_fork(PyObject* module, PyObject* nothing) {
  (void)module, (void)nothing;
  forks++;
  Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"after_fork", after_fork, METH_NOARGS, "after_fork(): in the child: graphs of its parent are not launched."},
    {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot module_slots[] = {SLOT(Py_mod_exec, run_module), {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_launch",      "Launches compiled kernels.",
                                        sizeof(State),         module_methods, module_slots,
                                        traverse_module,       clear_module,   free_module};

PyMODINIT_FUNC PyInit__launch(void) { return PyModuleDef_Init(&definition); }
