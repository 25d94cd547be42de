"""kernelhub as an attention backend of SGLang.

- `plugin`: registers it, in each of SGLang's processes
- `attention`: the backend
"""
