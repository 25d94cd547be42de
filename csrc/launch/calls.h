/* Calls: whole calls of an op, by their arguments.
 *
 * A call whose arguments are those of one before, but for the memory of its tensors, needs none of the op's Python:
 * what its function would look up is in a `Call`. Which calls are worth one is found out by counting those that have
 * none. */
#pragma once

#include "known.h"

typedef struct {
  PyObject_HEAD
  Known* known;
  int16_t sources[MAX_OPERANDS];  /* of the known call's operands: an argument, then results that are made; -1: None */
  int16_t results[MAX_RESULTS];   /* the same of what is returned */
  Py_ssize_t num_results;         /* 0: one, and no tuple */
  PyObject *made, *tick, *failed; /* functions: of each result that is made, of the count of calls, of an exception */
  PyObject *stock, *refill;       /* where `made` has None: see `take_stock`; or NULL */
  Known* form;           /* of the operands that are given, if that of `known` has what is made, too; or NULL */
  const uint64_t* pools; /* a counter that has to be what it was, or NULL, */
  uint64_t num_pools;    /* and what it was */
  PyObject* device;      /* of the launches */
  PyObject* finish;      /* (results that were made, argument) -> what is returned; or NULL: `results` */
  int16_t finished;      /* which argument */
  PyObject* contents;    /* bytes that the memory of an argument has to hold; or NULL */
  uint64_t contents_at;  /* the address of that memory, */
  int16_t contents_of;   /* and the argument */
  PyObject* counter;     /* as of `counter_of` */
  uint64_t signature;
  Py_ssize_t num_flat;
  PyObject* constants[MAX_OPERANDS]; /* NULL for a tensor */
  uint64_t weak; /* one bit per argument: it is this very object, of which the constant is a weak reference */
  uint8_t forms[MAX_OPERANDS];
  uint64_t repeated;           /* one bit per argument: it is the same tensor as one before it, */
  uint8_t first[MAX_OPERANDS]; /* which is this one */
  int early;                   /* whether exactly those operands that are made are not compared: before they are made */
  int followed_by;             /* which call came after it last */
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
  static char* names[] = {"known",    "sources", "results", "single",    "made", "tick",        "failed",
                          "stock",    "refill",  "finish",  "at",        "weak", "contents_of", "contents_at",
                          "contents", "form",    "pools",   "num_pools", NULL};
  Call* self = (Call*)object;
  State* state = PyModule_GetState(PyType_GetModule(Py_TYPE(object)));
  PyObject *known, *sources, *results, *made, *tick, *failed, *stock = NULL, *refill = NULL, *finish = NULL;
  PyObject *contents = NULL, *form = NULL;
  unsigned long long weak = 0, contents_at = 0, pools = 0, num_pools = 0;
  Py_ssize_t at = 0, contents_of = 0;
  int single;
  if (state == NULL ||
      !PyArg_ParseTupleAndKeywords(args, named, "O!O!O!pO!OO|O!OOnKnKSO!KK", names, state->known_type, &known,
                                   &PyTuple_Type, &sources, &PyTuple_Type, &results, &single, &PyTuple_Type, &made,
                                   &tick, &failed, &PyDict_Type, &stock, &refill, &finish, &at, &weak, &contents_of,
                                   &contents_at, &contents, state->known_type, &form, &pools, &num_pools))
    return -1;
  if (finish == Py_None) finish = NULL;
  Known* of = (Known*)known;
  Py_ssize_t count = PyTuple_Size(results);
  if (self->known != NULL || of->driver == NULL || of->checked || of->sequence == NULL ||
      PyTuple_Size(sources) != of->num_operands || count < 1 || count > MAX_RESULTS || (single && count != 1) ||
      PyTuple_Size(made) > MAX_RESULTS || (stock == NULL) != (refill == NULL) || at < -1 || at >= MAX_OPERANDS ||
      contents_of < 0 || contents_of >= MAX_OPERANDS || (contents != NULL && !((weak >> contents_of) & 1))) {
    PyErr_Format(PyExc_ValueError,
                 "made once, of a known call that launches, with all its operands, for 1 to %d results", MAX_RESULTS);
    return -1;
  }
  for (Py_ssize_t of = 0; of < PyTuple_Size(made) && stock == NULL; of++) {
    if (PyTuple_GetItem(made, of) != Py_None) continue;
    PyErr_SetString(PyExc_ValueError, "a result of the stock, without one");
    return -1;
  }
  const Known* compared = (Known*)form;
  if (compared != NULL && (compared->driver != of->driver || compared->num_compared >= compared->num_tensors ||
                           compared->num_operands != of->num_operands || compared->present != of->present)) {
    PyErr_SetString(PyExc_ValueError, "a form is one of the known call, with fresh tensors");
    return -1;
  }
  if (read_indices(sources, -1, 2 * MAX_OPERANDS, self->sources) < 0 ||
      read_indices(results, -1, 2 * MAX_OPERANDS, self->results) < 0)
    return -1;
  self->num_results = single ? 0 : count;
  Py_INCREF(known), Py_INCREF(made), Py_INCREF(tick), Py_INCREF(failed), Py_INCREF(of->sequence->device);
  Py_XINCREF(stock), Py_XINCREF(refill), Py_XINCREF(finish), Py_XINCREF(contents), Py_XINCREF(form);
  self->form = (Known*)form;
  self->pools = (const uint64_t*)(uintptr_t)pools;
  self->num_pools = num_pools;
  self->contents = contents;
  self->contents_at = contents_at;
  self->contents_of = (int16_t)contents_of;
  self->device = of->sequence->device;
  self->stock = stock;
  self->refill = refill;
  self->finish = finish;
  self->finished = (int16_t)at;
  self->weak = weak;
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
  Py_XDECREF(self->form);
  Py_XDECREF(self->made);
  Py_XDECREF(self->stock);
  Py_XDECREF(self->refill);
  Py_XDECREF(self->device);
  Py_XDECREF(self->finish);
  Py_XDECREF(self->contents);
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

/* Whether an argument, which is the tensor that it was, holds what it did: 1, 0, or -1 with an exception. */
static int has_contents(const Call* call, const Arguments* given) {
  uint64_t address;
  if (call->contents == NULL) return 1;
  if (address_of(call->known->driver, given->flat[call->contents_of], call->contents_of, &address) < 0) return -1;
  return address == call->contents_at && memcmp((const void*)(uintptr_t)address, PyBytes_AsString(call->contents),
                                                (size_t)PyBytes_Size(call->contents)) == 0;
}

/* Whether the arguments are those of a call, but for the memory of tensors: 1, 0, or -1 with an exception. */
static int is_call(const Call* call, const Arguments* given) {
  if (call->num_flat != given->count) return 0;
  for (Py_ssize_t at = 0; at < given->count; at++) {
    int tensor = (given->tensors >> at) & 1;
    if (call->forms[at] != given->forms[at]) return 0;
    if ((call->weak >> at) & 1) { /* a reference gives None once its object is gone */
      if (given->flat[at] == Py_None || PyWeakref_GetObject(call->constants[at]) != given->flat[at]) return 0;
      continue;
    }
    if (tensor != (call->constants[at] == NULL)) return 0;
    if (!tensor && !same_constant(call->constants[at], given->flat[at])) return 0;
    if (((call->repeated >> at) & 1) && given->flat[at] != given->flat[call->first[at]]) return 0;
  }
  return has_contents(call, given);
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

/* Results of the current stream's stock, as a tuple: 1, 0 if another device is current, or -1 with an exception.
 *
 * The stock has a list for each stream, of what later calls get: memory of torch's allocator is a stream's. A captured
 * call gets memory of its own, which is the graph's. */
static int take_stock(const Call* self, PyObject** taken) {
  Driver* driver = self->known->driver;
  void* stream;
  int captured = 0, current = is_current(driver, self->device);
  if (current != 1) return current;
  if (current_stream(driver, self->device, &stream) < 0) return -1;
  if (driver->capturing == NULL || driver->capturing(stream, &captured) != 0) captured = 1;
  PyObject* key = captured ? (Py_INCREF(Py_None), Py_None) : PyLong_FromVoidPtr(stream);
  PyObject* list = captured || key == NULL ? NULL : PyDict_GetItemWithError(self->stock, key);
  Py_ssize_t left = list != NULL && PyList_Check(list) ? PyList_Size(list) : 0;
  if (left > 0) {
    *taken = PyList_GetItem(list, left - 1);
    Py_INCREF(*taken);
    if (PyList_SetSlice(list, left - 1, left, NULL) < 0) Py_CLEAR(*taken);
  } else if (!PyErr_Occurred()) {
    *taken = PyObject_CallFunctionObjArgs(self->refill, key, NULL);
  }
  Py_XDECREF(key);
  if (*taken != NULL && !PyTuple_Check(*taken)) {
    PyErr_SetString(PyExc_TypeError, "a stock has tuples");
    return -1;
  }
  return *taken == NULL ? -1 : 1;
}

/* The tensors that a call makes: 1, 0 if it is not made here, or -1 with an exception. */
static int make_results(const Call* self, PyObject** made) {
  Py_ssize_t count = PyTuple_Size(self->made), next = 0;
  PyObject* taken = NULL;
  int state = self->stock == NULL ? 1 : take_stock(self, &taken);
  for (Py_ssize_t at = 0; at < count && state == 1; at++) {
    PyObject* by = PyTuple_GetItem(self->made, at);
    made[at] = by != Py_None ? PyObject_CallObject(by, NULL) : PyTuple_GetItem(taken, next++); /* borrowed of taken */
    if (by == Py_None) Py_XINCREF(made[at]);
    if (made[at] == NULL) state = -1;
  }
  Py_XDECREF(taken);
  return state;
}

/* What a launched call returns. */
static PyObject* result_of(const Call* self, const Arguments* given, PyObject* const* made) {
  PyObject* result;
  if (self->finish != NULL) {
    PyObject* all = tuple_of(made, PyTuple_Size(self->made), NULL);
    if (all == NULL) return NULL;
    result = PyObject_CallFunctionObjArgs(self->finish, all, argument_of(given, made, self->finished), NULL);
    Py_DECREF(all);
    return result;
  }
  if (self->num_results == 0) {
    result = argument_of(given, made, self->results[0]);
    Py_INCREF(result);
    return result;
  }
  result = PyTuple_New(self->num_results);
  for (Py_ssize_t at = 0; result != NULL && at < self->num_results; at++) {
    PyObject* one = argument_of(given, made, self->results[at]);
    Py_INCREF(one);
    PyTuple_SetItem(result, at, one);
  }
  return result;
}

/* What a call returns, launched: NULL with an exception, or without one if it is not this call or launched otherwise.
 */
static PyObject* call_again(Call* self, const Arguments* given) {
  PyObject *made[MAX_RESULTS] = {NULL}, *operands[MAX_OPERANDS], *tensors[MAX_OPERANDS], *result = NULL;
  uint64_t found[MAX_OPERANDS], addresses[MAX_OPERANDS];
  Known *known = self->known, *form = self->form ? self->form : known;
  Py_ssize_t num_made = PyTuple_Size(self->made);
  int launched = 0, early = self->early;
  for (Py_ssize_t at = 0; early && at < known->num_operands; at++)
    operands[at] = argument_of(given, made, self->sources[at]);
  if ((early && form_holds(form, operands, NULL) != 1) || make_results(self, made) != 1) goto done;
  for (Py_ssize_t at = 0; at < known->num_operands; at++) operands[at] = argument_of(given, made, self->sources[at]);
  launched = early ? lie_apart(form, operands, found) : is_known(known, operands, NULL, found);
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
  if (launched == 1 && count_call(self->tick, self->counter) == 0) result = result_of(self, given, made);
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
  if (call == NULL) return NULL;
  Py_INCREF((PyObject*)call); /* another thread may forget it */
  int here = call->pools == NULL || *call->pools == call->num_pools;
  PyObject* result = here && is_call(call, given) == 1 ? call_again(call, given) : NULL;
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
  if (call->finish != NULL && call->finished >= arguments.count)
    return PyErr_Format(PyExc_ValueError, "argument %d of %zd", (int)call->finished, arguments.count);
  if (call->contents != NULL && !((arguments.tensors >> call->contents_of) & 1))
    return PyErr_Format(PyExc_ValueError, "argument %d has no memory", (int)call->contents_of);
  const Known* form = call->form ? call->form : call->known;
  call->early = form->num_compared < form->num_tensors;
  for (Py_ssize_t at = 0; at < form->num_operands && call->early; at++) {
    int compared = !(form->present & (1ULL << at)) || at < form->places[form->num_compared];
    if (compared != (call->sources[at] < arguments.count)) call->early = 0;
  }
  if (call->form != NULL && !call->early)
    return PyErr_Format(PyExc_ValueError, "a form compares the arguments, and nothing else");
  call->signature = arguments.signature;
  call->num_flat = arguments.count;
  for (Py_ssize_t at = 0; at < arguments.count; at++) {
    call->forms[at] = arguments.forms[at];
    int weak = (call->weak >> at) & 1, tensor = (arguments.tensors >> at) & 1;
    if (weak && (call->constants[at] = PyWeakref_NewRef(arguments.flat[at], NULL)) == NULL) return NULL;
    if (!weak && !tensor) {
      Py_INCREF(arguments.flat[at]);
      call->constants[at] = arguments.flat[at];
    }
    for (Py_ssize_t one = 0; one < at && call->constants[at] == NULL && !((call->repeated >> at) & 1); one++) {
      if (arguments.flat[one] != arguments.flat[at]) continue;
      call->repeated |= 1ULL << at;
      call->first[at] = (uint8_t)one;
    }
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
