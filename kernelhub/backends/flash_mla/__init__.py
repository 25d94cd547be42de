"""FlashMLA, DeepSeek's kernels of latent attention: dense decode on sm_90, listed tokens on sm_90 and sm_100.

* `requirements`: what the records need of the installed copy, and how to distinguish its generations of functions;
* `kernels`: the records;
* `library`: importing it; `dense`, `sparse`: the adapters; `results`: what they share;
* `slots`, `finish`: device code around its calls: positions become slots of the cache, its results become ours.
"""
