"""Adapters compared with released versions of the real libraries: their wheels are downloaded, read, and never run."""
