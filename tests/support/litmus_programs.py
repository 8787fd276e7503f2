"""Litmus tests as parameters of a test, and some that are drawn at random."""

import random

import oracle
import pytest

from nbep.lab.litmus import Program
from nbep.lab.litmus.programs import PLACES


def named(programs):
    """One of three for the short part."""
    marks = [() if i % 3 == 0 else pytest.mark.thorough for i in range(len(programs))]
    return [pytest.param(program, id=program.name, marks=mark) for program, mark in zip(programs, marks, strict=True)]


def random_program(seed: int) -> Program:
    """Two or three threads of two or three steps on two cells."""
    choose = random.Random(seed)
    where = choose.choice(list(PLACES))
    registers = iter(range(20))

    def step():
        cell = choose.choice("xy")
        scope = choose.choice(["", "", "", ".cta", ".gpu", ".sys"])
        match choose.choice(["st", "st", "ld", "ld", "add", "fence"]):
            case "st":
                order = choose.choice(["weak", "relaxed", "release", "volatile"])
                return f"st.{order}{scope if order != 'volatile' else '.sys'} {cell} {choose.choice([1, 2])}"
            case "ld":
                order = choose.choice(["weak", "relaxed", "acquire", "volatile"])
                return f"ld.{order}{scope if order != 'volatile' else '.sys'} r{next(registers)} {cell}"
            case "add" if choose.random() < 0.4:
                order = choose.choice(["relaxed", "acquire", "release", "acq_rel"])
                return f"cas.{order}.sys r{next(registers)} {cell} 2 {choose.choice([0, 1, 1])}"
            case "add":
                return f"add.{choose.choice(['relaxed', 'release', 'acq_rel'])}.sys r{next(registers)} {cell} 1"
            case _:
                return f"fence.acq_rel{scope}"

    threads = [[step() for _ in range(choose.choice([2, 3]))] for _ in range(choose.choice([2, 2, 3]))]
    if where == "a block" and choose.random() < 0.5:
        for steps in threads:
            steps.insert(choose.randrange(len(steps) + 1), "bar")
    return Program(f"program {seed}", tuple("; ".join(steps) for steps in threads), where, {})


def in_oracle(program) -> oracle.Program:
    """A litmus test as a program of the oracle."""
    cells = program.cells

    def op(step) -> oracle.Op:
        if step.what == "bar":
            return oracle.Op("bar", value=len(program.threads))
        order = {"volatile": "relaxed"}.get(step.order, step.order)
        at = 8 * cells.index(step.cell) if step.cell else 0
        return oracle.Op(step.what, order, at, step.value, step.scope, other=step.compare)

    threads = [tuple(map(op, steps)) for steps in program.steps]
    match program.where:
        case "ranks":
            kernels = tuple((rank, (((thread,),),)) for rank, thread in enumerate(threads))
        case "a GPU":
            kernels = ((0, tuple(((thread,),) for thread in threads)),)
        case _:
            kernels = ((0, (tuple((thread,) for thread in threads),)),)
    hosts = [tuple(oracle.Op("launch", value=k) for k, (rank, _) in enumerate(kernels) if rank == r) for r in range(4)]
    return oracle.Program(kernels, tuple(hosts), 8 * len(cells) or 8)
