"""Short names for many modules, as an adapter's config states them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_ANY_EXPERT = r"\d+"


def target_modules(adapted: Iterable[str], others: Iterable[str]) -> list[str]:
    """The shortest endings of names that stand for the adapted modules and for none of the others.

    PEFT matches a module whose name ends with an entry. `gate_proj` is enough where every gate_proj of the
    model is adapted; where the shared experts' are not, the routed ones are named by their own numbers.
    """
    return _endings(list(adapted), list(others))


def rank_patterns(values: Mapping[str, float], default: float) -> dict[str, float]:
    """PEFT's `rank_pattern` or `alpha_pattern` for modules whose value is not the default.

    Keys are regular expressions on the ending of a name, and the first that fits counts; one stands for all
    experts of a kind where they agree.
    """
    groups: dict[float, list[str]] = defaultdict(list)
    for module, value in values.items():
        groups[value].append(module)
    patterns: dict[str, float] = {}
    for value, modules in groups.items():
        if value == default:
            continue
        others = [module for other, names in groups.items() if other != value for module in names]
        kinds = _endings(sorted({_kind(module) for module in modules}), sorted({_kind(m) for m in others}))
        if set(map(_kind, modules)).isdisjoint(map(_kind, others)):
            patterns.update(dict.fromkeys(map(_regex, kinds), value))
        else:
            patterns.update(dict.fromkeys(map(_regex, _endings(modules, others)), value))
    return patterns


def by_kind(modules: Iterable[str]) -> list[list[str]]:
    """The modules with those that differ in the expert's number together, by that number."""
    groups: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        groups[_kind(module)].append(module)
    return [sorted(group, key=_expert) if len(group) > 1 else group for group in groups.values()]


def _expert(module: str) -> int:
    match = _EXPERT.search(module)
    return int(match[0]) if match else -1


def _kind(module: str) -> str:
    return _EXPERT.sub(lambda _: _ANY_EXPERT, module)


def _regex(ending: str) -> str:
    return _ANY_EXPERT.join(re.escape(part) for part in ending.split(_ANY_EXPERT))


def _endings(wanted: list[str], others: list[str]) -> list[str]:
    taken = {ending for name in others for ending in _endings_of(name)}
    result: dict[str, None] = {}
    for name in wanted:
        free = (ending for ending in _endings_of(name) if ending not in taken)
        result[next(free, name)] = None
    return list(result)


def _endings_of(name: str) -> Iterable[str]:
    """From the last part to the whole name; none begins with a number, which would say little."""
    place = len(name)
    while (place := name.rfind(".", 0, place)) >= 0:
        if name[place + 1].isalpha():
            yield name[place + 1 :]
    yield name
