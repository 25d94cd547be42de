"""Our C++ kernels for CPUs, compiled on the machine they run on."""
