"""The state of all KERNELHUB_* variables, also invalid ones, and of other projects' variables that choose kernels.

The library itself stops at the first invalid KERNELHUB_* variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernelhub.cli.facets import ops
from kernelhub.compat.env.translation import IGNORE, Translation, translate
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.policy import Layer
from kernelhub.dispatch.registry import Registry
from kernelhub.dispatch.settings import PREFIX, VARIABLES, read_file, read_settings
from kernelhub.errors import ConfigurationError

_PLUGINS, _TIMEOUT, _CONFIG = "KERNELHUB_PLUGINS", "KERNELHUB_LOAD_TIMEOUT_S", "KERNELHUB_CONFIG"


@dataclass(frozen=True)
class State:
    """The state of one variable.

    Attributes:
        name: full name; also of an unknown variable.
        value: the value in force; None if it is invalid.
        source: ``"environment"``, ``"default"`` or ``"invalid"``.
        text: its text in the environment, or None.
        grammar: the accepted values.
        meaning: what it does.
        problem: the error that the first call would raise; empty if there is none.
    """

    name: str
    value: Any
    source: str
    text: str | None
    grammar: str
    meaning: str
    problem: str = ""


@dataclass(frozen=True)
class Variables:
    """Every variable, and the backends that its names were checked against.

    Attributes:
        states: variables of kernelhub in their order of declaration, then unknown ones that are set.
        registry: the backends, also if a variable is invalid and the library would load none.
        engines: variables of other projects that are set, translated.
    """

    states: tuple[State, ...]
    registry: Registry
    engines: tuple[Translation, ...] = ()

    @property
    def wrong(self) -> list[State]:
        """The variables with a problem."""
        return [state for state in self.states if state.problem]

    @property
    def engines_ignored(self) -> bool:
        """Whether kernelhub ignores all variables of other projects."""
        return any(state.name == IGNORE and state.value for state in self.states)

    def became_of(self, engine: Translation) -> str:
        """The effect of a variable of another project, as a sentence."""
        if engine.problem:
            return f"ignored: {engine.problem}"
        overrides = engine.meaning.overrides
        if self.engines_ignored and (overrides or engine.meaning.batch_invariant is not None):
            return f"ignored: {IGNORE} is set"
        if overrides and not any(self.registry.known_names(override.names, override.ops) for override in overrides):
            names = ", ".join(dict.fromkeys(name for override in overrides for name in override.names))
            ops = ", ".join(dict.fromkeys(override.ops for override in overrides))
            where = "" if ops == "*" else f" for {ops}"
            return f"ignored: {engine.says}, and no kernel of {names} is registered here{where}"
        return engine.says

    def config_file(self) -> tuple[str, Layer] | None:
        """The config file that is in force, and its settings."""
        state = next(state for state in self.states if state.name == _CONFIG)
        return None if state.value is None else (str(state.value), read_file(state.value))


def read_variables(environ: Mapping[str, str] | None = None) -> Variables:
    """The variables of the environment, each checked separately."""
    environ = os.environ if environ is None else environ
    registry, plugins_problem = _registry(environ)
    names = dict.fromkeys([*VARIABLES, *sorted(name for name in environ if name.startswith(PREFIX))])
    states = [_state(name, environ.get(name), registry, plugins_problem) for name in names]
    return Variables(tuple(states), registry, translate(environ))


def _state(name: str, text: str | None, registry: Registry, plugins_problem: str) -> State:
    variable = VARIABLES.get(name)
    grammar, meaning = (variable.grammar, variable.doc) if variable else ("", "not a variable of kernelhub")
    problem = _problem(name, text, registry)
    if name == _PLUGINS and not problem:
        problem = plugins_problem
    if problem:
        return State(name, None, "invalid", text, grammar, meaning, problem)
    setting = read_settings({} if text is None else {name: text}).values[name]
    return State(name, setting.value, setting.source, text, grammar, meaning)


def _problem(name: str, text: str | None, registry: Registry) -> str:
    """What is wrong with one variable: its name, its value, or unknown names in it."""
    if text is None:
        return ""
    try:
        settings = read_settings({name: text})
        for layer in (settings.force, settings.environment, settings.file):
            registry.check_layer(layer)
    except ConfigurationError as error:
        return str(error)
    return ""


def _registry(environ: Mapping[str, str]) -> tuple[Registry, str]:
    """Every backend that can be registered, and the error of KERNELHUB_PLUGINS."""
    try:
        _ = HUB.settings
        return HUB.registry, ""
    except ConfigurationError:
        registry = Registry(HUB.part("order"))
    contracts, backends = list(ops().values()), HUB.part("backends")()
    plugins, timeout_s = _value(_PLUGINS, environ), _value(_TIMEOUT, environ)
    try:
        registry.load(contracts, backends, plugins, timeout_s)
    except ConfigurationError as error:
        registry.load(contracts, backends, VARIABLES[_PLUGINS].default, timeout_s)
        return registry, str(error)
    return registry, ""


def _value(name: str, environ: Mapping[str, str]) -> Any:
    """The variable's value, or its default if the value is invalid."""
    try:
        return read_settings({name: environ[name]} if name in environ else {})[name]
    except ConfigurationError:
        return VARIABLES[name].default
