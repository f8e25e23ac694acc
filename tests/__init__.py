"""Without a GPU the Triton kernels run in its interpreter, to be asked for before anyone imports triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
