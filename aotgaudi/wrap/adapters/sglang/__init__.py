"""SGLang: kernels of DeepGEMM, TileLang and Triton, some of them one for each number of tokens.

Everything here is read from its sources, release 0.5.23 unless another one is named. Nothing of it has run on a GPU.
"""
