"""cuDNN's attention by its Python frontend (nvidia-cudnn-frontend); cuDNN itself comes with torch.

* `kernels`: the records and what is known to be wrong, `requirements`: what they need on the machine;
* `graphs`: a cuDNN graph for each class of shapes;
* `sdpa`, `paged`: the adapters, `queries`: what they share, `blank`: device code after a graph.
"""
