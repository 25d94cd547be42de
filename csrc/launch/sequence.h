/* Sequence: launches whose scalars and grids stay the same. */
#pragma once

#include "kernel.h"

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

/* Memory of torch's allocator, by `allocate` or `keep` of the driver; -1 with an exception. */
static int allocate(PyObject* by, unsigned long long bytes, void* stream, PyObject** memory) {
  PyObject *size = PyLong_FromUnsignedLongLong(bytes), *on = PyLong_FromVoidPtr(stream);
  *memory = size == NULL || on == NULL ? NULL : PyObject_CallFunctionObjArgs(by, size, on, NULL);
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

/* Make a room larger: 1, 0 if its memory must not be kept now, or -1 with an exception. */
static int enlarge(Sequence* self, Room* room, uint64_t bytes, void* stream) {
  Driver* driver = self->driver;
  PyObject *larger = NULL, *smaller = room->memory;
  uint64_t begin;
  if (allocate(driver->keep == Py_None ? driver->allocate : driver->keep, bytes, stream, &larger) < 0) return -1;
  if (larger == Py_None) {
    Py_DECREF(larger);
    return 0;
  }
  if (address_of(driver, larger, given_of(self), &begin) < 0) {
    Py_DECREF(larger);
    return -1;
  }
  room->memory = larger;
  room->bytes = bytes;
  room->address = begin;
  return smaller != NULL && release(driver, smaller) < 0 ? -1 : 1;
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
  if (found != NULL && !found->busy && all_bytes <= MOST_ROOMS) {
    found->busy = 1;
    int suffices = found->bytes >= self->room ? 1 : enlarge(self, found, room_bytes(self->room), stream);
    if (suffices == 1) {
      *room = found;
      *address = found->address;
      return 0;
    }
    found->busy = 0;
    if (suffices < 0) return -1;
  }
  if (allocate(driver->allocate, self->room, stream, memory) < 0) return -1;
  if (address_of(driver, *memory, given_of(self), address) == 0) return 0;
  Py_CLEAR(*memory);
  return -1;
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
