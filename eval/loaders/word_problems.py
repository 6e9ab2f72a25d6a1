"""Arithmetic word problems with worked answers, generated: the form of GSM8K, none of its text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

#: One problem: the question, the lines of the worked answer, the result.
_Problem = tuple[str, list[str], int]

_NAMES = (
    "Ada Bashir Carla Dmitri Elena Farid Greta Hugo Ines Jonas Keiko Lars Mira Nuno Olga Priya "
    "Quentin Rosa Samir Tessa Umar Vera Wanda Yusuf Zofia"
)


def generate_problems(seed: int, count: int) -> Iterator[tuple[str, str]]:
    """``count`` different problems, the same for the same seed: question and worked answer.

    The answer's lines hold one calculation each; its last line is ``#### n``.
    """
    rng = random.Random(f"word problems/{seed}")
    seen: set[str] = set()
    while len(seen) < count:
        template = _TEMPLATES[len(seen) % len(_TEMPLATES)]
        question, lines, result = template(rng)
        if question in seen:
            continue
        seen.add(question)
        yield question, "\n".join([*lines, f"#### {result}"])


def _name(rng: random.Random) -> str:
    return rng.choice(_NAMES.split())


def _bakery(rng: random.Random) -> _Problem:
    name, trays, rolls = _name(rng), rng.randint(3, 9), rng.randint(8, 24)
    baked = trays * rolls
    sold = rng.randint(5, baked - 5)
    return (
        f"{name} bakes {trays} trays of {rolls} rolls each in the morning. By noon {sold} of the "
        f"rolls are sold. How many rolls does {name} have left?",
        [
            f"{name} bakes {trays} * {rolls} = {baked} rolls.",
            f"After the sales {baked} - {sold} = {baked - sold} rolls are left.",
        ],
        baked - sold,
    )


def _orchard(rng: random.Random) -> _Problem:
    name, trees = _name(rng), rng.randint(4, 15)
    apples, crate = rng.randint(3, 12) * 10, rng.choice((5, 10))
    total = trees * apples
    return (
        f"An orchard has {trees} trees, and {name} picks {apples} apples from every tree. The "
        f"apples are packed into crates of {crate}. How many crates does {name} fill?",
        [
            f"The trees give {trees} * {apples} = {total} apples.",
            f"They fill {total} / {crate} = {total // crate} crates.",
        ],
        total // crate,
    )


def _wages(rng: random.Random) -> _Problem:
    name, rate = _name(rng), rng.randint(11, 25)
    hours, extra = rng.randint(20, 38), rng.randint(2, 8)
    normal, double = rate * hours, 2 * rate
    return (
        f"{name} earns ${rate} an hour and twice as much for work on Sundays. Last week {name} "
        f"worked {hours} hours from Monday to Friday and {extra} hours on Sunday. How many dollars "
        f"did {name} earn last week?",
        [
            f"From Monday to Friday {name} earned {rate} * {hours} = {normal} dollars.",
            f"An hour on Sunday pays 2 * {rate} = {double} dollars.",
            f"Sunday paid {double} * {extra} = {double * extra} dollars.",
            f"Together that is {normal} + {double * extra} = {normal + double * extra} dollars.",
        ],
        normal + double * extra,
    )


def _shopping(rng: random.Random) -> _Problem:
    name, shirts = _name(rng), rng.randint(2, 5)
    price, socks = rng.randint(9, 19), rng.randint(2, 6)
    pair = rng.randint(2, 5)
    note = 200
    first, second = shirts * price, socks * pair
    spent = first + second
    return (
        f"{name} buys {shirts} shirts at ${price} each and {socks} pairs of socks at ${pair} a "
        f"pair, and pays with ${note}. How many dollars does {name} get back?",
        [
            f"The shirts cost {shirts} * {price} = {first} dollars.",
            f"The socks cost {socks} * {pair} = {second} dollars.",
            f"Together they cost {first} + {second} = {spent} dollars.",
            f"{name} gets back {note} - {spent} = {note - spent} dollars.",
        ],
        note - spent,
    )


def _journey(rng: random.Random) -> _Problem:
    name, fast = _name(rng), rng.randint(60, 95)
    first, slow = rng.randint(2, 5), rng.randint(25, 50)
    second = rng.randint(1, 4)
    a, b = fast * first, slow * second
    return (
        f"{name} drives {first} hours on the motorway at {fast} kilometres an hour, and then "
        f"{second} hours on mountain roads at {slow} kilometres an hour. How many kilometres is "
        "the whole journey?",
        [
            f"The motorway part is {fast} * {first} = {a} kilometres.",
            f"The mountain part is {slow} * {second} = {b} kilometres.",
            f"The whole journey is {a} + {b} = {a + b} kilometres.",
        ],
        a + b,
    )


def _ages(rng: random.Random) -> _Problem:
    first, second, third = rng.sample(_NAMES.split(), 3)
    age, times, less = rng.randint(6, 15), rng.randint(2, 4), rng.randint(2, 5)
    older, other = age * times, age * times - less
    return (
        f"{first} is {age} years old. {second} is {times} times as old as {first}, and {third} is "
        f"{less} years younger than {second}. How old are the three of them together?",
        [
            f"{second} is {age} * {times} = {older} years old.",
            f"{third} is {older} - {less} = {other} years old.",
            f"{first} and {second} are {age} + {older} = {age + older} years old together.",
            f"All three are {age + older} + {other} = {age + older + other} years old together.",
        ],
        age + older + other,
    )


def _reading(rng: random.Random) -> _Problem:
    name, daily = _name(rng), rng.randint(12, 35)
    days, rest = rng.randint(4, 9), rng.randint(2, 8)
    done = daily * days
    pages = done + daily * rest
    return (
        f"A book has {pages} pages. {name} has read {daily} pages a day for {days} days and goes "
        f"on at the same speed. How many more days does {name} need to finish the book?",
        [
            f"So far {name} has read {daily} * {days} = {done} pages.",
            f"That leaves {pages} - {done} = {pages - done} pages.",
            f"They take {pages - done} / {daily} = {rest} days.",
        ],
        rest,
    )


def _garden(rng: random.Random) -> _Problem:
    name, length = _name(rng), rng.randint(12, 40)
    width, gate = rng.randint(6, 11), rng.randint(2, 4)
    metre = rng.randint(3, 9)
    half = length + width
    around, fence = 2 * half, 2 * half - gate
    return (
        f"{name}'s garden is a rectangle {length} metres long and {width} metres wide. A fence "
        f"goes all around it except for a gate of {gate} metres. Fence costs ${metre} a metre. How "
        "many dollars does the fence cost?",
        [
            f"Length and width together are {length} + {width} = {half} metres.",
            f"All around it is 2 * {half} = {around} metres.",
            f"Without the gate that is {around} - {gate} = {fence} metres of fence.",
            f"The fence costs {fence} * {metre} = {fence * metre} dollars.",
        ],
        fence * metre,
    )


def _sharing(rng: random.Random) -> _Problem:
    name, friends = _name(rng), rng.randint(3, 8)
    each, kept = rng.randint(4, 15), rng.randint(5, 20)
    shared = friends * each
    return (
        f"{name} has {shared + kept} marbles, keeps {kept} of them, and shares the rest equally "
        f"among {friends} friends. How many marbles does each friend get?",
        [
            f"{name} gives away {shared + kept} - {kept} = {shared} marbles.",
            f"Each friend gets {shared} / {friends} = {each} marbles.",
        ],
        each,
    )


def _saving(rng: random.Random) -> _Problem:
    name, start = _name(rng), rng.randint(20, 90)
    monthly, months = rng.randint(15, 45), rng.randint(5, 12)
    price = rng.randint(700, 990)
    added = monthly * months
    have = start + added
    return (
        f"{name} wants to buy a bicycle for ${price}. There are ${start} in the money box already, "
        f"and {name} puts in ${monthly} every month for {months} months. How many dollars are "
        "still missing then?",
        [
            f"In {months} months {name} puts in {monthly} * {months} = {added} dollars.",
            f"Then there are {start} + {added} = {have} dollars in the box.",
            f"There are {price} - {have} = {price - have} dollars missing.",
        ],
        price - have,
    )


def _tickets(rng: random.Random) -> _Problem:
    adults, children = rng.randint(30, 80), rng.randint(20, 60)
    adult, child = rng.randint(9, 16), rng.randint(3, 7)
    costs = rng.randint(50, 150)
    a, b = adults * adult, children * child
    return (
        f"A theatre sells {adults} tickets to adults at ${adult} and {children} tickets to "
        f"children at ${child}. The evening costs the theatre ${costs}. How many "
        "dollars of profit does it make?",
        [
            f"Adults pay {adults} * {adult} = {a} dollars.",
            f"Children pay {children} * {child} = {b} dollars.",
            f"That is {a} + {b} = {a + b} dollars.",
            f"The profit is {a + b} - {costs} = {a + b - costs} dollars.",
        ],
        a + b - costs,
    )


def _tank(rng: random.Random) -> _Problem:
    inflow, outflow = rng.randint(14, 30), rng.randint(3, 9)
    start, minutes = rng.randint(40, 120), rng.randint(6, 25)
    net = inflow - outflow
    return (
        f"A tank holds {start} litres of water. A pump adds {inflow} litres a minute, while "
        f"{outflow} litres a minute run out through a leak. How many litres are in the tank after "
        f"{minutes} minutes?",
        [
            f"Each minute the tank gains {inflow} - {outflow} = {net} litres.",
            f"In {minutes} minutes it gains {net} * {minutes} = {net * minutes} litres.",
            f"Then it holds {start} + {net * minutes} = {start + net * minutes} litres.",
        ],
        start + net * minutes,
    )


def _classes(rng: random.Random) -> _Problem:
    classes, pupils = rng.randint(4, 9), rng.randint(18, 28)
    absent, bus = rng.randint(2, 15), rng.choice((20, 25, 40))
    total = classes * pupils
    going = total - absent
    buses = -(-going // bus)
    return (
        f"A school has {classes} classes of {pupils} pupils. On the day of an outing {absent} "
        f"pupils are ill, and all others go by bus. A bus takes {bus} pupils, and all buses but "
        "perhaps the last are full. How many buses are needed?",
        [
            f"The school has {classes} * {pupils} = {total} pupils.",
            f"Of these {total} - {absent} = {going} go.",
            f"{buses - 1} buses take only {buses - 1} * {bus} = {(buses - 1) * bus} pupils.",
            f"One more is needed: {buses - 1} + 1 = {buses} buses.",
        ],
        buses,
    )


def _discount(rng: random.Random) -> _Problem:
    name, price = _name(rng), rng.randint(2, 12) * 20
    percent, pieces = rng.choice((5, 10, 15, 20, 25)), rng.randint(2, 6)
    off = price * percent // 100
    return (
        f"A lamp costs ${price}. In the sale every lamp is {percent} percent cheaper, and {name} "
        f"buys {pieces} of them. How many dollars does {name} pay?",
        [
            f"The discount on a lamp is {price} * {percent} / 100 = {off} dollars.",
            f"A lamp costs {price} - {off} = {price - off} dollars in the sale.",
            f"{pieces} lamps cost {price - off} * {pieces} = {(price - off) * pieces} dollars.",
        ],
        (price - off) * pieces,
    )


_TEMPLATES: tuple[Callable[[random.Random], _Problem], ...] = (
    _bakery,
    _orchard,
    _wages,
    _shopping,
    _journey,
    _ages,
    _reading,
    _garden,
    _sharing,
    _saving,
    _tickets,
    _tank,
    _classes,
    _discount,
)
