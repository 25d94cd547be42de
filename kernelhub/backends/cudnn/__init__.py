"""cuDNN's attention by its Python frontend (nvidia-cudnn-frontend); cuDNN itself comes with torch.

* `kernels`: the record, `requirements`: what it asks of the machine;
* `graphs`: a cuDNN graph for each class of shapes, `sdpa`: the adapter, `blank`: device code after it.

`paged_attention` is not among them: seen with cuDNN 9.19 on an H200, NaN in the unused end of a sequence's last page
reaches its result, since masked weights of zero are multiplied with it.
"""
