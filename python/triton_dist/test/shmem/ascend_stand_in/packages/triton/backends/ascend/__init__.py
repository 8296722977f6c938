"""Where triton-ascend has its backend."""
