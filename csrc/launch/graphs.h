/* Graphs: the launches of a sequence in one entry into the driver.
 *
 * A sequence keeps, for each of a few streams, a graph whose nodes are its kernels in a chain. A launch gives the nodes
 * whose parameters changed the new ones and launches the graph; both affect later work only, so the graph may be in
 * flight. Graphs of CUDA are for one thread at a time: one that finds them in use launches plainly, as one does into a
 * capture. */
#pragma once

#include "sequence.h"

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
    uint32_t attributes = launches[at].config.num_attributes - (kernel->overlaps_captured ? 1 : 0);
    for (uint32_t one = 0; status == 0 && one < attributes; one++)
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
    const Kernel* kernel = launches[at].kernel;
    /* Collectives that are programmatic where a caller captures them are not so in a graph of this launcher. */
    if ((self->owner != NULL && kernel->overlaps_captured) || kernel->may_be_node) continue;
    for (uint32_t one = 0; one < launches[at].config.num_attributes; one++) { /* it is none of a node */
      if (kernel->attributes[one].id == PROGRAMMATIC_STREAM) return 0;
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
