/* Kernel: a compiled function with the kinds of its arguments. */
#pragma once

#include "driver.h"

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
  int may_be_node;       /* of a graph of this launcher, where that attribute is left out */
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
  self->overlaps_captured = programmatic == CAPTURED_ONLY || programmatic == CAPTURED_OR_GRAPH;
  self->may_be_node = programmatic == CAPTURED_OR_GRAPH;
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

/* Make a device's context current in this thread, which has not used the device yet; -1 with an exception. */
static int enter(Driver* driver, PyObject* device) {
  PyObject* done = PyObject_CallFunctionObjArgs(driver->enter, device, NULL);
  Py_XDECREF(done);
  return done == NULL ? -1 : 0;
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
  int status = INVALID_CONTEXT;
  for (int entered = 0; status == INVALID_CONTEXT && entered < 2; entered++) {
    if (entered && enter(self->driver, self->device) < 0) return -1;
    status = self->driver->encode(encoded, map->type, (uint32_t)map->rank, (void*)(uintptr_t)now->address, sizes, bytes,
                                  map->box, steps, 0, map->swizzle, 2, now->padded);
  }
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
    if (enter(driver, device) < 0) return -1;
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
