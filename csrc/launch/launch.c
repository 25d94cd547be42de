/* Launches compiled kernels from Python: a call packs its arguments and enters cuLaunchKernelEx, nothing else.
 *
 * Python gives the driver's functions by their addresses, so nothing is linked against CUDA and no header of it is
 * needed. Arguments are packed on the stack of the call, so threads share kernels without a lock. Tensors are asked for
 * `data_ptr` through torch's own C function, which is looked up once. The module keeps to Python's stable ABI, so one
 * build serves 3.10 and later: methods with METH_FASTCALL are called as fast as by vectorcall.
 */
#include "calls.h"
#include "forms.h"
#include "layers.h"

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
    {"with_fresh", known_with_fresh, METH_VARARGS,
     "with_fresh(holds, fresh): the same without launches, of calls that make the last tensors; `holds` compares the others."},
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
  return PyModule_AddIntConstant(module, "VERSION", 18);
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
