"""The tile orders visit every tile once, at ragged edges too, and start at home. Run in the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

ORDERS = """
import triton_dist
import torch, triton, triton.language as tl
import triton_dist.language as dl

@triton.jit
def visit(out, m, n, rank, ranks, GROUP: tl.constexpr):
    for pid in range(ranks * m * n):
        owner, i, j = dl.rank_first_tile(pid, m, n, rank, ranks, GROUP)
        tl.store(out + pid * 3, owner)
        tl.store(out + pid * 3 + 1, i)
        tl.store(out + pid * 3 + 2, j)

for m, n, ranks, group in [(1, 1, 1, 1), (5, 3, 3, 2), (4, 2, 2, 8), (3, 4, 1, 3)]:
    for rank in range(ranks):
        out = torch.full((ranks * m * n, 3), -1, dtype=torch.int32)
        visit[(1,)](out, m, n, rank, ranks, group)
        order = [tuple(row) for row in out.tolist()]
        every = {(o, i, j) for o in range(ranks) for i in range(m) for j in range(n)}
        assert len(order) == len(every) and set(order) == every, (m, n, ranks, group, order)
        owners = [row[0] for row in order[:: m * n]]
        assert owners == [(rank + step) % ranks for step in range(ranks)], owners
        assert all(row[0] == owners[k // (m * n)] for k, row in enumerate(order))
        for k in range(min(group, m)):  # down the group first
            assert order[k][1:] == (k, 0), order
print("every tile once")
"""


def test_tile_orders_visit_every_tile_once_and_start_at_home(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "orders.py"  # Triton reads the kernel's source from a file
    script.write_text(ORDERS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_DIST_BACKEND": "cpu"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "every tile once", done.stderr[-3000:]
