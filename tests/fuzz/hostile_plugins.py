"""Plugins as nobody should write them: the source of a `kernels.py` with one thing wrong, drawn at random."""

from __future__ import annotations

from random import Random

_HEAD = """
from kernelhub.dispatch.constraint import AnyOf, Between, OneOf, OnDevice, Package, Rejection, Rule, anything
from kernelhub.dispatch.kernel import Backend, Band, GraphLevel, Kernel, KnownBad, Watch
from kernelhub.ops.attention.problem import AttentionProblem

FACETS = anything(*AttentionProblem.__dataclass_fields__)

class Raises:
    fields = ()
    def __init__(self, error): self.error = error
    def reject(self, problem, machine): raise self.error

class Answers:
    fields = ()
    def __init__(self, answer): self.answer = answer
    def reject(self, problem, machine): return self.answer

class NoWords(Raises):
    def __repr__(self): raise ValueError("no words")

class BadFields:
    @property
    def fields(self): raise OSError("fields")
    def reject(self, problem, machine): return None

class NoError(Exception):
    def __str__(self): raise ValueError("no text")
"""
_BACKEND = {"name": '"{name}"', "summary": '"a plugin"', "package": '""', "homepage": '""', "watches": "()"}
_KERNEL = {
    "op": '"attention"', "name": '"{name}.k"', "target": '"{name}_adapter:Fast"', "summary": '"a kernel"',
    "band": "Band.PLUGIN", "constraints": "(FACETS,)", "features": "frozenset()", "layouts": '("checkpoint",)',
    "packs_to": '""', "graph": "GraphLevel.NONE", "deterministic": "False", "batch_invariant": "False",
    "reads_lengths": "False", "configurable": "False", "source": '""',
}  # fmt: skip
_KNOWN_BAD = {
    "kernel": '"{name}.k"', "op": '"attention"', "where": "(FACETS,)", "symptom": '"wrong"', "issue": '"url"',
    "remedy": '""',
}  # fmt: skip
_WRONG = (
    *("None", "{{}}", "[]", "()", "0", "-1", "1.5", "True", '""', '"\\x00"', '"a.b.c"', '"../../x"', '"*"', "object()"),
    *('"x" * 100000', "[None]", "(None,)", "({{}},)", "Kernel", "lambda: None", "float('nan')", "range(3)", "{{1, 2}}"),
    *('"torch"', '"torch.sdpa"', '"module:"', '":attr"', '"a b:c"', "b'bytes'", "iter(())", "('softcap')", '"softcap"'),
)
# The value of KERNELS, where ONE is a right record.
_KERNELS = (
    *("(ONE)", "None", "{{}}", "ONE.name", "(None,)", "({{}},)", "[ONE, None]", "(ONE, ONE)", "(Kernel,)", "0"),
    *(
        "{{ONE}}",
        "(ONE for _ in range(3))",
        "'KERNELS'",
        "((ONE,),)",
        "(BACKEND,)",
        "iter([ONE])",
        "(ONE, Band.PLUGIN)",
    ),
)
# Constraints that registration takes and selection meets.
_CONSTRAINTS = (
    *("Raises(ValueError('no'))", "Raises(SystemExit(3))", "Raises(RecursionError())", "Raises(NoError())"),
    *("NoWords(KeyError('x'))", "Answers(True)", "Answers('a reason')", "Answers(Rejection('code', None))"),
    *("Answers(Rejection(1, 2, 3))", "Answers(Rejection([], 'x'))", "BadFields()", "Raises", "None", "'text'"),
    *("Rule((), lambda problem: 1 / 0)", "Rule((), lambda problem: 7)", "Rule((), None)", "Rule('device', None)"),
    *("Between('head_dim_qk', 'a', None)", "OneOf('q_dtype', 5)", "OneOf('q_dtype', None)", "OnDevice(None, 3)"),
    *("Package('a.b')", "Package('')", "Package(None)", "Package('torch', 'not versions')", "Package('torch', None)"),
    *("AnyOf(())", "AnyOf((Raises(ValueError()),))", "AnyOf(None)", "AnyOf((None,))", "OneOf('nonsense', ())"),
)
_BODIES = (
    *("raise SystemExit(3)", "raise KeyboardInterrupt", "raise RecursionError", "1 / 0", "def (", "KERNELS = ()"),
    *("BACKEND = None\nKERNELS = ()", "import nowhere_to_be_found", "def __getattr__(name): raise OSError(name)"),
    "import sys; del sys.modules[__name__]",
)


def plugin(name: str, random: Random) -> tuple[str, str]:
    """Source of a plugin with one thing wrong, and what is wrong with it."""
    backend, kernel, known_bad, kernels = dict(_BACKEND), dict(_KERNEL), dict(_KNOWN_BAD), "(ONE,)"
    what = random.choice(("backend", "kernel", "kernel", "kernel", "known_bad", "kernels", "constraint", "body"))
    if what == "body":
        body = random.choice(_BODIES)
        return body + "\n", body
    if what == "kernels":
        wrong = kernels = random.choice(_KERNELS)
    elif what == "constraint":
        wrong = random.choice(_CONSTRAINTS)
        if random.random() < 0.3:
            known_bad["where"] = f"({wrong},)"
        else:
            kernel["constraints"] = f"({wrong}, FACETS)"
    else:
        fields = {"backend": backend, "kernel": kernel, "known_bad": known_bad}[what]
        field = random.choice(sorted(fields))
        fields[field] = random.choice(_WRONG)
        wrong = f"{what}.{field} = {fields[field]}"
    said = "\n".join(
        (
            f"BACKEND = Backend({_words(backend)})",
            f"ONE = Kernel({_words(kernel)})",
            f"KERNELS = {kernels}",
            f"KNOWN_BAD = (KnownBad({_words(known_bad)}),)",
        )
    )
    return _HEAD + said.replace("{name}", name).replace("{{", "{").replace("}}", "}") + "\n", wrong


def _words(fields: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items())
