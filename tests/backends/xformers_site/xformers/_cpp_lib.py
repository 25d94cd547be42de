"""Stand-in: whether the compiled library was loaded."""

_built_with_cuda = True
_cpp_library_load_exception = None
