"""The command ``kernelhub``.

`main` finds the command and turns errors into exit codes. Each command is one file with `add_arguments` and `run`.
Beside them: `options` (flags that several commands share), `facets` and `models` (a problem written as flags),
`console` (a terminal, a pipe or a document), `schemas` (the documents), `here` (what this machine can run), `variables`
(what the environment says), `fact` with `machine_facts` and `dispatch_facts` (the lines of `doctor`), `demonstration`
with `showcase` and `block` (the calls of `demo`).
"""
