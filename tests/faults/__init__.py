"""Faults that are injected, and what must come of each: `records` lists them, every other file here injects some.

Many are injected by tests that stand elsewhere, beside what they try; they are marked ``@pytest.mark.fault(key)``.
`counting` counts what really ran, and prints it at the end.
"""
