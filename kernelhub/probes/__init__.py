"""Facts about this machine: one fact per probe, found without importing the package it is about.

A probe never raises, never initialises CUDA, writes no file, opens no socket, and imports no other part of kernelhub.
"""
