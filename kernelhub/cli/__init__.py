"""The command ``kernelhub``: ask, from a shell, what a program would be told.

`main` finds the command and turns errors into exit codes. Each command is one file with `add_arguments`
and `run`: `demo`, `doctor`, `backends`, `explain`, `env`. Beside them: `console` (a terminal or a pipe),
`facets` and `models` (a problem written as flags), `here` (what this machine can run), `variables` (what the
environment says), `fact` with `machine_facts` and `dispatch_facts` (the lines of `doctor`), `showcase` and
`measure` (the calls of `demo`).
"""
