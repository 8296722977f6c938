"""Kernels for Ascend NPUs on a machine that has none: lower them with the public part of the Ascend compiler and check
what came out. `python -m third_party.ascend.lower --help`; docs/ascend.md tells the whole story.

    lower.py          the command, run in the main environment
    pool.py           its worker processes and what became of each kernel
    toolchain.py      makes and finds the toolchain's own virtual environment
    lowering.py       one kernel: Triton -> TTIR -> ttadapter -> HIVM, run inside that environment
    worker.py         lowers and checks job after job, run inside that environment
    arguments.py      types of a signature, values of constants
    chips.py          the chips
    hints.py          what to do about failures whose messages do not say it
    sources.py        imports a kernel's file where torch is absent
    cases/            what `--all` lowers: every kernel of this library, its signature and its constants
    checks/           what must hold in the HIVM
    run_on_host.py    another command: runs the ttadapter IR on this machine's CPU (host_execution/)
    aclshmem/         kernels that call aclshmem's own device functions, as far as HIVM
"""
