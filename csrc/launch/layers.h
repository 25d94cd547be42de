/* Layers: calls of an engine's layers.
 *
 * The layers of an engine's step differ in few tensors. Those of a layer stay the same from step to step, those of a
 * step from layer to layer: their form and addresses are found once. So each call looks at two tensors, the queries and
 * the destination, or the keys and the values of a write. Between two calls the engine runs much else, so what a call
 * reads is in no near cache: the lines are few, and all are asked for before the first is waited for. */
#pragma once

#include "known.h"

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
  Known *two, *of_layer, *of_step;   /* forms of the two, of a layer's and of a step's tensors */
  PyObject *tick, *counter, *failed; /* as of a Call */
  PyObject *launches, *form;         /* where it is, and under which key it was found last */
  Py_ssize_t num_operands, num_gaps;
  Gap* gaps;                      /* of the sequence's operands */
  uint16_t sources[MAX_OPERANDS]; /* of those: the two, then the layer's, then the step's */
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
    return PyErr_Format(PyExc_TypeError, "takes two tensors, a cache, a form, and the tensors of a step");
  if (given[2] != self->cache) Py_RETURN_FALSE;
  Layers* layers = layers_of(self, given[3]);
  if (layers == NULL) return PyErr_Occurred() ? NULL : PyBool_FromLong(0);
  if (count != 4 + layers->of_step->num_operands) Py_RETURN_FALSE;
  Py_INCREF(object), Py_INCREF((PyObject*)layers); /* another thread may forget them */
  int launched = launch_layer(layers, given, self, given + 4);
  Py_DECREF(object), Py_DECREF((PyObject*)layers);
  return launched < 0 ? NULL : PyBool_FromLong(launched);
}
