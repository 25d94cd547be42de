"""Tables that ship with kernelhub: files of `kernelhub tune --export`, read after the user's own.

There are none yet.
"""
