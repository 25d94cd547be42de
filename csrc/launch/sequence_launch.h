/* Launching a sequence: by the graph of its stream, or one launch after the other. */
#pragma once

#include "graphs.h"

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
