"""A few of a test's cases, in place of all combinations of its parameters."""

from __future__ import annotations

import pytest


def choices(item: pytest.Item) -> set[tuple[object, ...]]:
    """What is particular to a case: what each `parametrize` and each fixture gave it, by implementation."""
    given = dict(item.callspec.params)
    which = given.pop("each", None)
    found = set()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        found.add((which, *names, repr([given.pop(name) for name in names])))
    return found | {(which, name, repr(value)) for name, value in given.items()}


def few_of(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Of one test's cases as few as have all choices among them, and each choice about as often as others."""
    left = {case: choices(case) for case in cases}
    used = dict.fromkeys(set().union(*left.values()), 0)
    few = []
    while missing := {choice for choice, times in used.items() if times == 0}:
        few.append(max(left, key=lambda case: (len(left[case] & missing), -sum(map(used.get, left[case])))))
        for choice in left.pop(few[-1]):
            used[choice] += 1
    return few
