"""All ranks of a process group run one plan, or none.

`agree` is `kernelhub.agree`; `statement` what a rank says it would run, `meeting` where ranks say it and how a dead or
slow one is named, `rounds` the order in which they speak, `settle` what follows from all statements, `agreed` what
stands from then on, `process` how another process is looked at.
"""
