"""Answers judged as math-verify judges them, where both apply.

Left out, for we differ on purpose: scientific notation with an e (math-verify reads 1.5e3 as 1.5),
a leading + and the minus sign U+2212 (it reads none), \\text around a number (it compares that as a
string), tiny decimals (it rounds to six places, we compare exactly), expressions and sets (we
compare them as text).
"""
import random

import pytest

math_verify = pytest.importorskip("math_verify")

from data_tool import ask  # noqa: E402


def integer(rng):
    value = rng.choice([rng.randint(-20, 20), rng.randint(-10**6, 10**6), rng.randint(0, 10**12)])
    return value


def write(rng, value):
    """Ways to write a whole number."""
    ways = [str(value), f"{value:,}", f"{value}.0", f"\\boxed{{{value}}}", f"${value}$",
            f"\\boxed{{{value:,}}}", f"{value}."]
    return rng.choice(ways)


def write_fraction(rng, a, b):
    sign = "-" if a < 0 else ""
    ways = [f"{a}/{b}", f"\\boxed{{\\frac{{{a}}}{{{b}}}}}", f"${sign}\\frac{{{abs(a)}}}{{{b}}}$",
            f"\\boxed{{\\dfrac{{{a}}}{{{b}}}}}", f"\\boxed{{{a}/{b}}}"]
    return rng.choice(ways)


def cases():
    rng = random.Random(7)
    pairs = []
    for _ in range(250):
        a = integer(rng)
        pairs.append((write(rng, a), write(rng, a)))
        pairs.append((write(rng, a), write(rng, a + rng.choice([-1, 1, 10]))))
    for _ in range(250):
        a, b = rng.randint(-40, 40), rng.choice([2, 4, 5, 8, 10, 16, 20])
        k = rng.randint(1, 3)
        pairs.append((write_fraction(rng, a, b), write_fraction(rng, a * k, b * k)))
        pairs.append((write_fraction(rng, a, b), str(a / b)))
        pairs.append((write_fraction(rng, a, b), write_fraction(rng, a + 1, b)))
        percent = rng.randint(1, 300)
        pairs.append((f"{percent}\\%", rng.choice([f"{percent / 100}", f"{percent}",
                                                   f"{percent + 1}"])))
    words = ["so the answer is {}", "we get {} at last", "first 3, then 4; {}", "{}"]
    return [(rng.choice(words).format(response), truth) for truth, response in pairs]


def test_agrees_with_math_verify():
    pairs = cases()
    # The truth alone is what a data set holds; the response is prose around an answer.
    truths = [math_truth(truth) for _, truth in pairs]
    ours = ask([{"op": "correct", "response": response, "truth": truth}
                for (response, _), truth in zip(pairs, truths)])
    different = []
    agreed = {True: 0, False: 0}
    for (response, _), truth, judged in zip(pairs, truths, ours):
        gold = math_verify.parse(f"${truth}$", parsing_timeout=None)
        answer = math_verify.parse(response, parsing_timeout=None)
        theirs = math_verify.verify(gold, answer, timeout_seconds=None)
        if judged != theirs:
            different.append((response, truth, judged, theirs, gold, answer))
        else:
            agreed[judged] += 1
    print(agreed, len(different))
    assert not different, different[:10]
    assert min(agreed.values()) > 200


def math_truth(truth):
    """What stands in the box, without dollars."""
    if truth.startswith("\\boxed{"):
        truth = truth[len("\\boxed{"):-1]
    return truth.strip("$").rstrip(".")
