"""Chooses the window (k and k'): the most of the model that fits on the device and makes a batch faster."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.plan.window import Window

# The values of k' that are tried. More layers in one transfer are seldom worth their slots.
_TOGETHER = (1, 2, 4)
# Plans whose times differ by at most this factor count as equally fast; the smallest of them is chosen.
SAME = 1.01


def choose_window(window: Window, seconds: Callable[[Plan], float]) -> Plan:
    """Returns the plan that fits and has the fastest batch. Among equally fast plans (:data:`SAME`), it prefers small ones.

    For each k' only the largest k that fits is tried. Then k is halved as long as the plan stays equally fast. If no plan fits,
    the smallest window is returned.

    Args:
        window: the options of the user, and the plans that fit.
        seconds: predicts the seconds of a batch with a plan.
    """
    together = [each for each in _TOGETHER if each <= window.count] if window.k_prime == "auto" else [window.k_prime]
    largest = (_largest(window, k_prime) for k_prime in together)
    times = {plan: seconds(plan) for plan in largest if window.fits(plan)}
    if not times:
        return window.smallest()
    enough = min(times.values()) * SAME
    plan = min((each for each in times if times[each] <= enough), key=lambda each: each.peak_device_bytes)
    while window.k == "auto" and plan.k > 1:
        smaller = window.plan(plan.k // 2, plan.k_prime)
        if seconds(smaller) > enough:
            break
        plan = smaller
    return plan


def _largest(window: Window, k_prime: int) -> Plan:
    """Returns the plan with this k' and the largest k that fits; k is 1 if no k fits. A k of the user takes precedence."""
    fitting = 0
    if window.k == "auto":
        ks = range(1, window.count + 1)
        fitting = bisect_left(ks, True, key=lambda k: not window.fits(window.plan(k, k_prime)))
    return window.plan(max(1, fitting), k_prime)
