"""Pairs of texts that are made, not read: small tasks with one right answer, of which some are never trained on."""

import datetime
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# Those of the standard library follow the locale.
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_FIRST_DAY, _LAST_DAY = datetime.date(1900, 1, 1).toordinal(), datetime.date(2099, 12, 31).toordinal()
_FORMATS = (
    "{month} {day}, {year}", "{day} {month} {year}", "{short} {day}, {year}", "{weekday}, {month} {day}, {year}",
    "{month} {day}{th}, {year}", "the {day}{th} of {month} {year}", "{number:02}/{day:02}/{year}",
    "{day}.{number}.{year}",
)  # fmt: skip
_STRINGS, _SHORTEST, _LONGEST = 100_000, 2, 20  # how many strings, and letters of one


@dataclass(frozen=True)
class Task:
    """Pairs in groups; those of a group have the same answer and lie on the same side of the split.

    Attributes:
      groups, members: how many, and how many pairs each has.
      key: the content of a group, by which it is split.
      pair: (source, target) of a group's member.
    """

    groups: int
    members: int
    key: Callable[[int], str]
    pair: Callable[[int, int], tuple[str, str]]


def words(number: int) -> str:
    """The English name of a number from 0 to 999,999."""
    thousands, rest = divmod(number, 1000)
    if not thousands:
        return _below_thousand(rest)
    return f"{_below_thousand(thousands)} thousand" + (f" {_below_thousand(rest)}" if rest else "")


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if hundreds:
        return f"{_ONES[hundreds]} hundred" + (f" {_below_thousand(rest)}" if rest else "")
    if rest < 20:
        return _ONES[rest]
    tens, ones = divmod(rest, 10)
    return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")


def _date(group: int) -> datetime.date:
    return datetime.date.fromordinal(_FIRST_DAY + group)


def written(date: datetime.date, member: int) -> str:
    """A date in one of the formats: "March 5, 1998", "the 5th of March 1998", "03/05/1998" (the month first) …"""
    month, day = _MONTHS[date.month - 1], date.day
    th = "th" if day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    names = dict(month=month, short=month[:3], number=date.month, weekday=_DAYS[date.weekday()])
    return _FORMATS[member].format(**names, day=day, th=th, year=date.year)


def letters(number: int) -> str:
    """The string of 2 to 20 small letters that belongs to a number, as good as random."""
    first, *rest = hashlib.blake2b(str(number).encode(), digest_size=_LONGEST + 1).digest()
    length = _SHORTEST + first % (_LONGEST - _SHORTEST + 1)
    return "".join(chr(ord("a") + byte % 26) for byte in rest[:length])


TASKS = {
    "numbers": Task(1_000_000, 1, str, lambda n, _: (str(n), words(n))),
    "dates": Task(
        _LAST_DAY - _FIRST_DAY + 1, len(_FORMATS), lambda n: _date(n).isoformat(),
        lambda n, member: (written(_date(n), member), _date(n).isoformat()),
    ),
    "reversal": Task(_STRINGS, 1, letters, lambda n, _: (letters(n), letters(n)[::-1])),
    "sort": Task(_STRINGS, 1, letters, lambda n, _: (letters(n), "".join(sorted(letters(n))))),
}  # fmt: skip
