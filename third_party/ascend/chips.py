"""The chips that kernels are lowered for. Imports nothing: it is read where triton is absent."""

CHIPS = ("Ascend910B2", "Ascend910B4", "Ascend910_9392")
SIMT_CHIP = "Ascend950PR_9589"  # an extra: its vector cores run threads, so a kernel skips ttadapter
