"""Structured output: a sentence about a person, and the JSON object that its prompt asks for.

Sentences, facts and the keys that are asked for vary; names are held out by the question itself, so that no evaluation
question was ever trained.
"""

from __future__ import annotations

import json
from random import Random

from apps.toys.tasks import ProceduralTask, Row

FIRST = (
    "Maria Omar Lena Juan Aiko Peter Fatima Carl Ines Tomas Grace Ivan Sofia Ahmed Nora Paul Mei Victor Clara Hugo "
    "Amara Leo Ruth Diego Hana Felix Zoe Samir Olga Jonas"
).split()
LAST = (
    "Lopez Haddad Weber Silva Tanaka Novak Rossi Jensen Okafor Brown Petrov Kim Moreau Khan Lind Costa Schmidt Adams "
    "Chen Ward Nagy Ruiz Berg Patel Frank Mori Cruz Olsen Reid Stone"
).split()
JOBS = (
    "nurse|teacher|pilot|baker|lawyer|farmer|painter|plumber|chemist|driver|dentist|tailor|singer|welder|librarian|"
    "carpenter|architect|mechanic|journalist|butcher"
).split("|")
CITIES = (
    "Oslo|Lima|Cairo|Madrid|Kyoto|Prague|Boston|Lagos|Vienna|Dublin|Athens|Quito|Hanoi|Porto|Zurich|Denver|Rabat|"
    "Seoul|Turin|Accra"
).split("|")
SENTENCES = (
    "{name}, {age}, works as a {job} in {city}.",
    "{name} is a {age}-year-old {job} from {city}.",
    "The {job} {name} lives in {city} and is {age} years old.",
    "In {city} we met {name}, a {job} aged {age}.",
    "At {age}, {name} still enjoys being a {job} in {city}.",
    "{city} is home to {name}, who is {age} and earns a living as a {job}.",
)
KEYS = ("name", "age", "job", "city")


class Extract(ProceduralTask):
    """`difficulty` is the number of keys that are asked for, at most four."""

    name = "records"

    def draw(self, rng: Random, low: int, high: int) -> Row:
        facts = {
            "name": f"{rng.choice(FIRST)} {rng.choice(LAST)}",
            "age": rng.randint(18, 90),
            "job": rng.choice(JOBS),
            "city": rng.choice(CITIES),
        }
        keys = rng.sample(KEYS, min(len(KEYS), rng.randint(low, high)))
        sentence = rng.choice(SENTENCES).format(**facts)
        asked = ", ".join(f'"{key}"' for key in keys)
        return Row(f"{sentence}\nGive a JSON object with the keys {asked}.", json.dumps({key: facts[key] for key in keys}))

    def size(self, low: int, high: int) -> int:
        return len(FIRST) * len(LAST) * len(JOBS) * len(CITIES) * len(SENTENCES) * 73
