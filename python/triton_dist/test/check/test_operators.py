"""Operators and tutorials pass the checker, and a wait or notify taken out of an operator is reported.

Few schedules each; the whole tables: operators.py and planted.py in this folder, as commands."""

import os
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
try:
    import operators
    import planted
finally:
    sys.path.remove(HERE)


@pytest.mark.parametrize("name", operators.PROGRAMS)
def test_an_operator_shows_nothing(name):
    report = operators.explore(name, 3 if name == "broadcast" else 2, 2)
    assert report.ok, str(report)


@pytest.mark.parametrize("number", ["04", "05", "08", "09"])
def test_a_tutorial_shows_nothing(number):
    report = operators.explore(number, 2, 2)
    assert report.ok, str(report)


PLANTS = [plant for name in ("all_gather", "broadcast", "barrier", "reduce_scatter") for plant in planted.plants(name)]
PLANTS += [plant for plant in planted.plants("allgather_gemm") if plant.word in ("wait", "put_signal")]


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_what_is_taken_out_is_reported(plant):
    reports = planted.try_plant(plant, 3, 12)
    assert not reports[-1].ok, plant
    assert operators.module(plant.name)  # and the operator is whole again


RELAXED = [plant for name in ("all_gather", "broadcast", "gemm_reduce_scatter") for plant in planted.plants(name)]
RELAXED = [plant for plant in RELAXED if plant.relaxed]


@pytest.mark.parametrize("plant", RELAXED, ids=str)
def test_a_signal_without_its_order_gives_a_wrong_result_in_weak_memory(plant):
    reports = planted.try_plant(plant, 3, 51, weak=True, races=False)
    assert reports[-1].kinds == ["wrong-result"], plant
