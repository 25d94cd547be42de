/* Known: calls that the checks of an op have let through. */
#pragma once

#include "sequence_launch.h"

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

static void keep_holds(Known* self, PyObject* holds) {
  if (PyObject_TypeCheck(holds, &PyCFunction_Type) && PyCFunction_GetFlags(holds) == METH_VARARGS) {
    self->function = PyCFunction_GetFunction(holds);
    self->self = PyCFunction_GetSelf(holds);
  }
  Py_INCREF(holds);
  self->holds = holds;
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
  self->num_operands = count;
  self->num_tensors = tensors;
  self->num_compared = tensors - fresh;
  keep_holds(self, holds);
  Py_INCREF(driver);
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

/* Whether the tensors that were not made for a call have the form of it: 1, 0, or -1 with an exception.
 *
 * `tensors` are the operands that are tensors, or NULL. Those that are made are not looked at. */
static int form_holds(Known* self, PyObject* const* given, PyObject* tensors) {
  Py_ssize_t fresh = self->num_compared < self->num_tensors ? self->places[self->num_compared] : self->num_operands;
  for (Py_ssize_t at = 0; at < self->num_operands && !self->checked; at++) {
    if (!(self->present & (1ULL << at))) {
      if (given[at] != Py_None) return 0;
    } else if (at < fresh) {
      int plain = is_plain(self->driver, given[at]);
      if (plain != 1) return plain;
    }
  }
  PyObject* passed = tensors;
  if (passed == NULL && (passed = tuple_of(given, self->num_compared, self->places)) == NULL) return -1;
  PyObject* answer = self->function ? self->function(self->self, passed) : PyObject_CallObject(self->holds, passed);
  if (tensors == NULL) Py_DECREF(passed);
  int holds = answer == NULL ? -1 : PyObject_IsTrue(answer);
  Py_XDECREF(answer);
  return holds;
}

/* Whether tensors of the form lie as those of the call did: 1, 0, or -1 with an exception. On 1 `addresses` has that of
 * each, if it is not checked before. */
static int lie_apart(Known* self, PyObject* const* given, uint64_t* addresses) {
  if (self->checked) return 1;
  for (Py_ssize_t at = self->num_compared; at < self->num_tensors; at++) {
    if (Py_TYPE(given[self->places[at]]) != Py_TYPE(given[self->places[0]])) return 0; /* in a mode of torch */
  }
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

/* Whether a call's checks would let it through again: 1, 0, or -1 with an exception; see `form_holds`, `lie_apart`. */
static int is_known(Known* self, PyObject* const* given, PyObject* tensors, uint64_t* addresses) {
  int holds = form_holds(self, given, tensors);
  return holds == 1 ? lie_apart(self, given, addresses) : holds;
}

/* Keep the pairs of tensors of which both are compared. */
static Gap* compared_pairs(const Gap* pairs, Py_ssize_t count, Py_ssize_t num_compared, Py_ssize_t* kept) {
  Gap* made = calloc((size_t)count + 1, sizeof(Gap));
  *kept = 0;
  for (Py_ssize_t at = 0; made != NULL && at < count; at++) {
    if (pairs[at].one < num_compared && pairs[at].other < num_compared) made[(*kept)++] = pairs[at];
  }
  return made;
}

static PyObject* known_with_fresh(PyObject* object, PyObject* args) {
  Known* self = (Known*)object;
  PyObject* holds;
  Py_ssize_t fresh;
  if (!PyArg_ParseTuple(args, "On", &holds, &fresh)) return NULL;
  if (self->num_compared < self->num_tensors) Py_RETURN_NONE; /* it has fresh ones of its own */
  if (self->driver == NULL || self->checked || fresh < 1 || fresh >= self->num_compared)
    return PyErr_Format(PyExc_ValueError, "%zd fresh tensors of %zd", fresh, self->num_compared);
  PyObject* made = PyType_GenericAlloc(Py_TYPE(object), 0);
  if (made == NULL) return NULL;
  Known* other = (Known*)made;
  other->num_operands = self->num_operands;
  other->num_tensors = self->num_tensors;
  other->num_compared = self->num_compared - fresh;
  other->present = self->present;
  memcpy(other->places, self->places, sizeof self->places);
  other->gaps = compared_pairs(self->gaps, self->num_gaps, other->num_compared, &other->num_gaps);
  other->same = compared_pairs(self->same, self->num_same, other->num_compared, &other->num_same);
  if (other->gaps == NULL || other->same == NULL) {
    Py_DECREF(made);
    return PyErr_NoMemory();
  }
  keep_holds(other, holds);
  Py_INCREF((PyObject*)self->driver);
  other->driver = self->driver;
  return made;
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
