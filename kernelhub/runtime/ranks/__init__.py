"""All ranks of a process group run one plan, or none.

`agree` is `kernelhub.agree`. `statement` is what a rank would run, `meeting` exchanges statements and names a dead or
slow rank, `rounds` defines the order of messages, `settle` computes the result from all statements, and `agreed`
enforces it in this process.
"""
