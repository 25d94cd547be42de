/* Driver: what belongs to a process. */
#pragma once

#include "cuda_types.h"

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
  PyObject* keep;     /* the same of memory that outlives the call; it gives None where that must not be; or None: as
                         `allocate` */
  PyObject* release;  /* (memory); or None: it goes with the object */
  PyObject* current;  /* () -> the current device; or None */
  PyCFunction current_function;
  PyObject* current_self;
  int64_t (*modes_of)(void); /* how many modes of torch this thread is in, by torch's own function; or NULL */
  PyObject* modes;           /* the same in Python, () -> the number; or None: they are not asked for */
  PyObject* traced;          /* () -> whether one of them records operators, or replaces memory by none */
  PyObject* runtime;         /* has launch_enter_hook and launch_exit_hook; or None */
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
  static char* names[] = {"launch",      "encode",      "tensor",     "data_ptr",     "stream_of",
                          "failed",      "enter",       "current",    "runtime",      "allocate",
                          "release",     "nested",      "capturing",  "counters",     "graphs",
                          "graph_after", "graph_least", "pointer_of", "graph_shared", "usual",
                          "keep",        "modes",       "traced",     "modes_of",     NULL};
  Driver* self = (Driver*)object;
  unsigned long long launch, encode, capturing, graph_after = 0, pointer_of = 0, modes_of = 0;
  int graph_least = 1, graph_shared = 0;
  PyObject *graphs = NULL, *usual = NULL, *keep = Py_None, *modes = Py_None, *traced = Py_None;
  PyObject *tensor, *data_ptr, *stream_of, *failed, *enter, *current, *runtime, *allocate, *release, *nested, *counters;
  if (!PyArg_ParseTupleAndKeywords(args, named, "KKOOOOOOOOOOKO|O!KiKpOOOOK", names, &launch, &encode, &tensor,
                                   &data_ptr, &stream_of, &failed, &enter, &current, &runtime, &allocate, &release,
                                   &nested, &capturing, &counters, &PyTuple_Type, &graphs, &graph_after, &graph_least,
                                   &pointer_of, &graph_shared, &usual, &keep, &modes, &traced, &modes_of))
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
  self->modes_of = (int64_t (*)(void))(uintptr_t)modes_of;
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
  Py_XINCREF(of_python), Py_INCREF(keep), Py_INCREF(modes), Py_INCREF(traced);
  self->usual = (PyTypeObject*)of_python;
  self->impl_at = impl_at;
  self->table = table;
  self->counters = counters;
  self->nested = nested;
  self->nested_of = (descrgetfunc)PyType_GetSlot(Py_TYPE(nested), Py_tp_descr_get);
  self->current = current;
  self->allocate = allocate;
  self->keep = keep;
  self->modes = modes;
  self->traced = traced;
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
  Py_XDECREF(self->keep);
  Py_XDECREF(self->modes);
  Py_XDECREF(self->traced);
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

/* Whether torch traces this thread, and so sees no launch by address: 1, 0, or -1 with an exception. */
static int traced(Driver* driver) {
  if (driver->modes_of != NULL) {
    if (driver->modes_of() == 0) return 0;
  } else {
    if (driver->modes == Py_None) return 0;
    PyObject* count = PyObject_CallObject(driver->modes, NULL);
    if (count == NULL) return -1;
    int modes = PyObject_IsTrue(count);
    Py_DECREF(count);
    if (modes <= 0) return modes;
  }
  PyObject* found = PyObject_CallObject(driver->traced, NULL);
  int answer = found == NULL ? -1 : PyObject_IsTrue(found);
  Py_XDECREF(found);
  return answer;
}

/* Whether a launch is left to Python, since torch traces it or a hook of the profiler is set: 1, 0, or -1 with an
 * exception. */
static int hooked(Driver* driver) {
  int left = traced(driver);
  if (left != 0) return left;
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
