"""The proof of a deadlock, with threads in place of ranks: one shared table, one row a rank."""

import random
import subprocess
import sys
import threading
import time

import pytest

import triton_dist
from triton_dist.errors import BackendError, DeadlockError, PeerLostError, WaitTimeoutError

pytestmark = pytest.mark.skipif(not triton_dist.interpreted, reason="checks the CPU engine; kernels are compiled here")

if triton_dist.interpreted:
    from triton_dist.interpreter.board import PID, Board
    from triton_dist.limits import wait_timeout


def boards(world, lost=lambda: []):
    memory = bytearray(Board.nbytes(world))
    made = [Board(memory, rank, world, lost) for rank in range(world)]
    for board in made:
        board.alone = lambda: True  # the threads here stand for ranks
    return made


def on_threads(*calls):
    results = [None] * len(calls)

    def run(i):
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def test_all_ranks_blocked_is_a_deadlock_and_all_get_the_same_report():
    table = boards(3)
    results = on_threads(*[  # well before the limit of a wait, 120 s
        lambda board=board: board.wait(lambda: False, lambda: f"wants signal {board.rank + 40}") for board in table
    ])
    for error in results:
        assert isinstance(error, DeadlockError)
        assert all(f"rank {r}: wants signal {r + 40}" in str(error) for r in range(3))


def test_a_rank_in_host_code_prevents_the_proof():
    table = boards(2)
    with pytest.raises(WaitTimeoutError, match=r"rank 1: in host code"):
        table[0].wait(lambda: False, lambda: "waits", timeout=0.3)


def test_random_hand_overs_give_no_false_report():
    world, rounds = 3, 300
    table, turn = boards(world), [0]

    def play(rank):
        board, rng = table[rank], random.Random(rank)
        for i in range(rounds):
            mine = i * world + rank
            board.wait(lambda mine=mine: turn[0] == mine, lambda: "waits for its turn")
            if rng.random() < 0.05:
                time.sleep(rng.random() * 0.02)
            turn[0] += 1

    assert on_threads(*[lambda r=r: play(r) for r in range(world)]) == [None] * world


def test_a_report_does_not_linger():
    table = boards(2)
    first = on_threads(*[lambda b=b: b.wait(lambda: False, lambda: "first") for b in table])
    assert all(isinstance(error, DeadlockError) for error in first)
    flag = []
    timer = threading.Timer(0.3, lambda: flag.append(1))
    timer.start()
    table[0].wait(lambda: bool(flag), lambda: "second")  # rank 1 is in host code: no proof, no old verdict


def test_a_lost_peer_ends_the_wait_by_name():
    table = boards(2, lost=lambda: [(1, "exited (pid 123)")])
    with pytest.raises(PeerLostError, match=r"rank 1 exited \(pid 123\)"):
        table[0].wait(lambda: False, lambda: "waits")


def test_a_failed_peer_ends_the_wait_with_its_error():
    table = boards(2)
    threading.Timer(0.1, lambda: table[1].failed("kernel k failed: ValueError: 13")).start()
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="ValueError: 13"):
        table[0].wait(lambda: False, lambda: "waits")
    assert time.monotonic() - started < 60  # half the limit of a wait


def test_a_failure_of_long_ago_is_not_blamed():
    table = boards(2)
    table[1].failed("an old failure")
    time.sleep(0.01)
    with pytest.raises(WaitTimeoutError):
        table[0].wait(lambda: False, lambda: "waits", timeout=1.5)


def test_the_timeout_must_be_a_positive_number(monkeypatch):
    for bad in ("0", "-1", "soon", "nan"):
        monkeypatch.setenv("TRITON_DIST_WAIT_TIMEOUT", bad)
        with pytest.raises(BackendError, match="TRITON_DIST_WAIT_TIMEOUT"):
            wait_timeout()


def test_a_long_text_is_cut_not_lost():
    table = boards(2)
    results = on_threads(*[lambda b=b: b.wait(lambda: False, lambda: "x" * 100_000) for b in table])
    assert all(isinstance(error, DeadlockError) for error in results)


def test_a_wait_in_which_nobody_computes_warns_once(capfd, monkeypatch):
    table = boards(2)
    monkeypatch.setattr("triton_dist.interpreter.board.IDLE_FROM_S", 0.3)
    monkeypatch.setattr("triton_dist.interpreter.board.IDLE_WARN_S", 1.0)
    code = "print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as idle:
        idle.stdout.readline()  # it has started
        table[1].row[PID] = idle.pid
        with pytest.raises(WaitTimeoutError):
            table[0].wait(lambda: False, lambda: "waits for signal 5", timeout=4)
        idle.kill()
    text = capfd.readouterr().err
    assert text.count("[WARN]") == 1 and "waits for signal 5" in text and "rank 1: in host code" in text
