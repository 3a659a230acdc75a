"""Which cases are left of a test in the interpreter."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from support.few_cases import few_of


class Case:
    """What pytest knows of one: the parameters, and what each `parametrize` names."""

    def __init__(self, params, marks):
        self.callspec = SimpleNamespace(params=params)
        self.iter_markers = lambda _: [SimpleNamespace(args=(mark,)) for mark in marks]


def cases(marks, *values):
    """All combinations of these values of parameters; marks: what each `parametrize` names."""
    names = ",".join(marks).split(",")
    found = []
    for each in itertools.product(*values):
        flat = [part for value in each for part in (value if isinstance(value, tuple) else (value,))]
        found.append(Case(dict(zip(names, flat, strict=True)), [mark for mark in marks if mark != "each"]))
    return found


def params(chosen):
    return [tuple(case.callspec.params.values()) for case in chosen]


def test_each_value_is_there_and_about_as_often_as_others():
    few = params(few_of(cases(["a", "b"], range(6), "xyz")))
    assert sorted(a for a, _ in few) == list(range(6))
    assert sorted(b for _, b in few) == [*"xxyyzz"]


def test_values_that_one_parametrize_gives_together_stay_together():
    few = params(few_of(cases(["a,b", "c"], [(1, 1), (1, 2), (2, 1), (2, 2)], "xy")))
    assert sorted((a, b) for a, b, _ in few) == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_both_implementations_have_every_value():
    few = params(few_of(cases(["each", "a"], ["reference", "triton"], range(3))))
    assert sorted(few) == sorted(itertools.product(["reference", "triton"], range(3)))
