"""Which runs are to come, once one is over: for each race one in which the later step comes first."""

from __future__ import annotations

from typing import Any

from .every_choice import Choice, Rest
from .every_order import clock_before, comes_before, join
from .every_step import Step, Who, load_of

Tree = Any  # that of `every`


def reverse_races(tree: Tree) -> None:
    """Have other runs in which the later one of two steps that depend on each other comes first."""
    tree.races.go_to(len(tree.steps))
    # With weak memory nothing is learned later of a step, unless its cell turns out to be mixed.
    is_final = tree.is_weak and not any(step.cell is not None and step.cell.is_mixed for step in tree.steps)
    first = tree.planned - 1 if is_final else 0  # the steps before were the same in an earlier run
    for earlier, later in tree.races.found:
        if later >= first and not tree.steps[later].is_wait:
            reverse(tree, earlier, tree.steps[later], later)
    for number, step in enumerate(tree.steps):
        if step.is_wait:
            let_go_on(tree, step, number)
    for at, looks in tree.failed:
        for store, look, number in tree.races.of_failed(at, looks):
            reverse(tree, store, look, at, number)
    for who, host in tree.hosts.items():
        wait = Step(who, load_of(host.words), host.clock, None)
        wait.clock = clock_before(tree.steps, wait)
        for step in tree.steps:
            if step.access.meets(wait.access):
                join(wait.clock, step.clock)
        let_go_on(tree, wait, len(tree.steps))


def let_go_on(tree: Tree, wait: Step, number: int) -> None:
    """A host has gone on at a step, or not up to the end: have it go on before stores that come first, in some run.

    Where it would not go on, the stores matter that it would have read there.
    """
    known = clock_before(tree.steps, wait)
    words = set(wait.access.words)
    found: list[int] = []
    for at in reversed(range(number)):
        step = tree.steps[at]
        if not step.access.is_store or words.isdisjoint(step.access.words) or known.get(step.who, -1) >= at:
            continue
        parked = tree.choices[at].parked.get(wait.who)
        if parked is not None:
            words |= parked
            if may_be_without(tree, at, number, words):
                reverse(tree, at, wait, number)
        elif not any(comes_before(tree.steps, at, later) for later in found):
            found.append(at)
            reverse(tree, at, wait, number)


def may_be_without(tree: Tree, at: int, number: int, words: set[tuple[Any, int]]) -> bool:
    """Whether some of these words may be stored to between two steps also if the first one is not made."""
    later = (step for step in tree.steps[at + 1 : number] if step.access.is_store)
    who = tree.steps[at].who
    return any(step.clock.get(who, -1) < at and not words.isdisjoint(step.access.words) for step in later)


def reverse(tree: Tree, at: int, last: Step, number: int, looks: int = 1) -> None:
    """Have a step come before an earlier one, in some run: one of those who can begin what leads there.

    looks: how many of its turn come up to it, if it is known
    """
    first: dict[Who, int] = {}
    for later in range(at + 1, number + 1):
        step = last if later == number else tree.steps[later]
        if later != number and comes_before(tree.steps, at, later):
            continue
        if step.who not in first and all(step.clock.get(who, -1) < begin for who, begin in first.items()):
            first[step.who] = later
    choice = tree.choices[at]
    begun = {who for who in first if may_begin(choice, who, looks if who == last.who else 1)}
    for who in [who for who in first if who in choice.parked or choice.fails(who)]:
        del first[who]
    if not (first or begun) or (tree.parts is not None and not tree.parts.reverses(tree.steps[at].who, last.who)):
        return
    if not first.keys() - begun and begun:
        if not begun & choice.begun:
            choice.begun.add(min(begun))
        return
    if not first.keys() <= choice.waiting.keys():  # something else than an access has let one of them come there
        choice.wanted |= {who for who in choice.waiting if not choice.fails(who)}
    elif not first.keys() & choice.wanted and (awake := first.keys() - choice.asleep.keys()):
        choice.wanted.add(min(awake))  # who is asleep may have come into this run without a need: see `Tried`


def may_begin(choice: Choice, who: Who, looks: int) -> bool:
    """Whether a thread whose wait would fail at a choice may make its first looks there, and more of them later."""
    asleep = choice.asleep.get(who)
    return isinstance(asleep, Rest) and asleep.begun is None and len(asleep.looks) > (looks if asleep.is_whole else 1)
