"""kernelhub as an attention backend of SGLang.

- `plugin`: registers the backend in each SGLang process
- `attention`: the backend
- `start`: warm-up and seal while a model runner starts
"""
