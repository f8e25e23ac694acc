"""What must be settled before anyone imports torch or triton.

Test processes that run side by side would fight for the cores with all their threads and be many times as
slow. Without a GPU the Triton kernels run in its interpreter.
"""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
