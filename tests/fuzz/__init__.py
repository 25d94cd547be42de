"""A differential fuzzer for every op and every kernel that runs on this machine.

    python -m tests.fuzz --op attention --backend triton --seed 0 --cases 200 --kinds strides,garbage

A case is a right call, taken from the op's own cases or drawn at random (`bases`), that is varied in one way, its kind
(`kinds`): operands in odd memory, destinations that alias operands, garbage where the contract calls memory unused,
other threads of execution through plans and steps. What comes out is held against the op's reference in float64 with
the op's own tolerance (`outcome`); what is around operands and results must stay as it was (`memory`). Wrong calls
(`wrong`) must be refused with the parameter's name. Cases run in children that may crash (`run`), in an order and with
values that the seed decides alone.
"""
