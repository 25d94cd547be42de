"""Tables that come with kernelhub: files that `kernelhub tune --export` wrote, read after the user's own.

None has been measured yet on a machine that its maintainers vouch for.
"""
