/* Forms: sequences by the form of their operands. */
#pragma once

#include "known.h"

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
