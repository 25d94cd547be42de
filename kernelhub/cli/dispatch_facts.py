"""Facts of `doctor` about dispatch: settings, libraries of backends, plugins, and the kernel that each op would run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kernelhub.cli.defects import defects
from kernelhub.cli.env import file_words
from kernelhub.cli.facets import ops
from kernelhub.cli.fact import ABSENT, NOTE, OK, PROBLEM, Fact
from kernelhub.cli.here import LAYOUT, devices, libraries_of, measured_devices, obstacles, plain_selection
from kernelhub.cli.variables import Variables
from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.order import line_for, ranked
from kernelhub.dispatch.reasons import OF_DEVICES
from kernelhub.dispatch.registry import Registered
from kernelhub.dispatch.selection import Selection
from kernelhub.evidence.quarantine import all_kept, remedy
from kernelhub.evidence.store import Miss
from kernelhub.evidence.trust import covered as covered_on
from kernelhub.evidence.tuning.decide import FASTER
from kernelhub.evidence.tuning.lookup import MeasuredTable
from kernelhub.evidence.tuning.tables import other_standings
from kernelhub.probes.device import DeviceFacts
from kernelhub.probes.distributions import distributions_of
from kernelhub.probes.finding import Finding
from kernelhub.probes.package import folders

_VERIFY_AGAIN = "warm up or verify again; `kernelhub cache clear --stale` removes old results"
_TUNE_AGAIN = "`kernelhub tune --model NAME` measures again; `kernelhub cache clear --stale` removes old results"
_OF_DEVICES = (*OF_DEVICES, "interpreter_off")


def settings(variables: Variables) -> Iterator[Fact]:
    """Every variable that is set, and the config file."""
    written = [state for state in variables.states if state.text is not None]
    for state in written:
        if state.problem:
            yield Fact(PROBLEM, state.problem, "every call fails until it is fixed", f"change or unset {state.name}")
        else:
            yield Fact(OK, f"{state.name}={state.text}", state.meaning)
    if not written:
        yield Fact(OK, "no KERNELHUB_* variable is set", "defaults apply; `kernelhub env` lists them")
    file = variables.config_file()
    if file is not None:
        path, layer = file
        yield Fact(OK, f"config file {path}", "; ".join(file_words(layer)) or "no settings")


def engines(variables: Variables) -> Iterator[Fact]:
    """Variables of other projects that are set, with their effect; for wrong and removed names, the successor."""
    for item in variables.engines:
        follows = variables.became_of(item)
        what = f"{item.name}={item.text}"
        if item.problem:
            yield Fact(NOTE, what, follows, f"write {item.successor}" if item.successor else "change or unset it")
        elif item.successor:
            meaning = f"{follows}; {item.owner} itself reads {item.successor} in its place"
            yield Fact(NOTE, what, meaning, "set both")
        else:
            yield Fact(OK, what, follows)


def libraries(variables: Variables, can_choose: bool) -> Iterator[Fact]:
    """The libraries of each built-in backend, and why its kernels cannot run here; torch has facts of its own."""
    here = devices() if can_choose else []
    selections = {name: [plain_selection(record.name, device) for device in here] for name, record in ops().items()}
    for registered in variables.registry.backends.values():
        copies = libraries_of(registered) if registered.builtin else []
        if not copies or copies[0].subject == "torch":
            continue
        if can_choose:
            yield _library(registered, copies, selections)
        else:
            for finding in copies:
                yield Fact(OK if finding.ok else ABSENT, finding.reason, "", finding.remedy)


def known_defects(variables: Variables) -> Iterator[Fact]:
    """Known defects of kernels that could run here, each once, with its remedy."""
    known = dict.fromkeys(
        defect
        for device in devices()
        for registered in variables.registry.backends.values()
        for defect in defects(registered, device)
    )
    for kernel, entry, problems in known:
        where = f"never selected for {problems}" if problems else "never selected"
        yield Fact(NOTE, f"known defect of {kernel.name}", f"{entry.symptom}; {where} ({entry.issue})", entry.remedy)


def quarantine() -> Iterator[Fact]:
    """Kernels that `kernelhub verify` found wrong here, and stored results that are not valid here."""
    if not HUB.settings["KERNELHUB_EVIDENCE"]:
        yield Fact(NOTE, "KERNELHUB_EVIDENCE=0", "kernels that were found wrong here may be selected", "unset it")
        return
    for device in measured_devices():
        kept = all_kept(device)
        good = sum(not record.result.failures for record in kept.records.values())
        if good:
            yield Fact(OK, f"{good} kernels verified on {device.name}", "right between these versions")
        for (op, kernel), record in kept.records.items():
            if record.result.failures:
                what = f"{op} {kernel} is quarantined on {device.name}"
                meaning = f"selected only by name: on {record.date[:10]} {record.result.reason}"
                yield Fact(NOTE, what, meaning, remedy(record.result))
        for miss in kept.misses:
            meaning = "its results are not valid here"
            yield Fact(NOTE, f"{miss.path} {miss.reason}", meaning, "verify again, or remove it")


def trust() -> Iterator[Fact]:
    """Kernels verified here for the user's problem classes, and unverified kernels that would otherwise rank first."""
    trusts = HUB.policy("attention").trust
    for device in measured_devices():
        misses: list[Miss] = []
        covered = {key: items for key, items in covered_on(device, misses).items() if items}
        if covered:
            classes = sum(map(len, covered.values()))
            what = f"{len(covered)} kernels verified for {classes} problem classes on {device.name}"
            yield Fact(OK, what, "they are selected there unless a faster kernel is")
        for miss in misses:
            yield Fact(NOTE, f"{miss.path} {miss.reason}", "its results are not valid here", _VERIFY_AGAIN)
        faster = {name: decisions for name in ops() if (decisions := plain_selection(name, device).faster)}
        if faster:
            names = ", ".join(dict.fromkeys(decisions[0].kernel for decisions in faster.values()))
            verb = "is" if len(faster) == 1 else "are"
            what = f"{names} would rank first on {device.name} but {verb} not verified there"
            meaning = f"trust is {trusts!r}: for plain calls of {', '.join(faster)} the next best kernel runs"
            first = next(iter(faster.values()))[0]
            yield Fact(NOTE, what, meaning, f"`kernelhub warmup --model NAME` verifies them; for one: {first.remedy}")


def tuned() -> Iterator[Fact]:
    """Valid measurements of each device, and measurements that are not valid here."""
    if not HUB.settings["KERNELHUB_EVIDENCE"]:
        return  # `quarantine` reports it
    for device in measured_devices():
        misses: list[Miss] = []
        entries = list(MeasuredTable(device, HUB.settings["KERNELHUB_TUNED"]).entries(misses))
        if entries:
            changed = sum(entry.word == FASTER for entry in entries)
            what = f"{len(entries)} problem classes tuned on {device.name}"
            yield Fact(OK, what, f"for {changed} of them another kernel than the order's is faster and selected")
        for miss in misses:
            yield Fact(NOTE, f"{miss.path} {miss.reason}", "its times are not valid here", _TUNE_AGAIN)
        for folder, differs in other_standings(device):
            yield Fact(NOTE, f"{folder} was measured for {differs}", "its times are not valid here", _TUNE_AGAIN)


def plugins(variables: Variables) -> Iterator[Fact]:
    """Third-party backends; broken ones with the reason."""
    for registered in variables.registry.backends.values():
        if not registered.builtin:
            yield _plugin(registered)


def selections() -> Iterator[Fact]:
    """For each kind of device here and each op: the kernel that would run, and faster kernels that are missing."""
    for device in devices():
        for record in ops().values():
            yield _selected(record, device)


def _library(registered: Registered, copies: list[Finding], selections: Mapping[str, list[Selection[Any]]]) -> Fact:
    """One backend: its copies, the number of kernels that can run, and why others cannot run, by frequency."""
    what = "; ".join(_with_place(finding) for finding in copies)
    total = f"{len(registered.kernels)} kernels of backend {registered.name}"
    usable, elsewhere, against, remedies = 0, 0, Counter[str](), dict[str, str]()
    for kernel in registered.kernels:
        reasons = [obstacles(kernel, selection) for selection in selections[kernel.op]]
        if not all(reasons):
            usable += 1
        elif all(any(item.code in _OF_DEVICES for item in items) for items in reasons):
            elsewhere += 1
        else:
            lacks = [item for items in reasons for item in items if item.code not in _OF_DEVICES]
            against.update({item.reason for item in lacks})
            for item in lacks:
                remedies[item.reason] = remedies.get(item.reason) or item.remedy
    if usable == len(registered.kernels):
        return Fact(OK, what, f"fits {total}")
    words = [f"{usable} of {total} can run here"]
    if elsewhere:
        words.append(f"{elsewhere} are for other devices")
    if _absent(copies):
        return Fact(ABSENT, what, "; ".join(words), copies[0].remedy if against else "")
    words += [f"{number} lack this: {reason}" for reason, number in against.most_common() if reason not in what]
    first = next((remedies[reason] for reason, _ in against.most_common() if remedies[reason]), "")
    return Fact(NOTE if against else OK, what, "; ".join(words), first)


def _absent(copies: list[Finding]) -> bool:
    return copies[0].code == "package_missing"


def _with_place(finding: Finding) -> str:
    """The state of a package, its distribution and its folder; nothing is imported."""
    folder = next(iter(folders(finding.subject)), None)
    if folder is None:
        return finding.reason
    names = [
        item.name if finding.value else f"{item.name} {item.version or 'of unknown version'}"
        for item in distributions_of(finding.subject)
    ]
    return f"{finding.reason} ({' or '.join(names) or 'of no distribution'}, {folder})"


def _plugin(registered: Registered) -> Fact:
    of = f" ({registered.distribution})" if registered.distribution else ""
    what = f"backend {registered.name} from {registered.origin}{of}"
    if registered.error:
        remedy = "fix or uninstall it, or list the other plugins in KERNELHUB_PLUGINS"
        return Fact(NOTE, what, f"none of its kernels can be selected: {registered.code}: {registered.error}", remedy)
    return Fact(OK, what, f"{len(registered.kernels)} kernels registered")


def _selected(record: OpRecord[Any], device: DeviceFacts) -> Fact:
    name = record.name
    selection = plain_selection(record.name, device)
    missing = _missing(record, selection)
    remedies = "; ".join(f"for {kernel.name}: {rejection.remedy}" for kernel, rejection in missing)
    more = f"`kernelhub explain {name}` says why"
    if selection.kernel is None:
        return Fact(PROBLEM, f"{name} on {device.name}: no kernel", selection.because, remedies or more)
    what = f"{name} on {device.name}: {selection.selected}"
    if not missing:
        return Fact(OK, what, "ranked first for a plain call")
    names = ", ".join(kernel.name for kernel, _ in missing)
    return Fact(NOTE, what, f"{names} would rank above it", remedies)


def _missing(record: OpRecord[Any], selection: Selection[Any]) -> Sequence[tuple[Kernel, Rejection]]:
    """Kernels ranked above the selected one that could be made to run here, with remedies."""
    contract = record
    candidates = HUB.registry.candidates(contract.name)
    problem = selection.problem
    line = line_for(candidates.lines, problem.device, contract.regime(problem))
    missing = []
    for kernel in ranked(candidates.kernels, line):
        if kernel is selection.kernel:
            break
        decision = next(item for item in selection.decisions if item.kernel == kernel.name)
        against = tuple(rejection for rejection in decision.rejections if rejection.code != LAYOUT)
        fits = against == obstacles(kernel, selection)
        # Without a remedy, such as a kernel for other devices, the user cannot change it.
        if fits and all(rejection.remedy for rejection in decision.rejections):
            missing += [(kernel, rejection) for rejection in decision.rejections]
    return missing
