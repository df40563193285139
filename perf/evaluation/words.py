"""Pools of words that tasks are made of; words of a pool begin with different tokens, so one tells them apart."""

from __future__ import annotations

PLACES = tuple("harbor library museum bakery stadium hospital airport garden castle theater market bridge".split())  # noqa: SIM905
NAMES = tuple("Alice Bruno Clara Derek Elena Felix Greta Hugo Irene Jonas Karla Leon".split())  # noqa: SIM905
PEOPLE = tuple("Martin Nadia Oscar Paula Quentin Rosa Simon Tara".split())  # noqa: SIM905
COLORS = tuple("red blue green yellow purple orange white black silver pink brown gold".split())  # noqa: SIM905
CITIES = tuple("Oslo Lisbon Vienna Dublin Madrid Athens Prague Rome Paris Berlin London Warsaw".split())  # noqa: SIM905
ANIMALS = tuple("tiger eagle dolphin rabbit horse spider turtle monkey falcon lion wolf bear".split())  # noqa: SIM905
ORDINALS = tuple("first second third fourth fifth".split())  # noqa: SIM905
OBJECTS = tuple(
    "table window river candle mirror ladder basket pencil hammer bottle carpet engine ticket blanket "  # noqa: SIM905
    "camera button needle lantern anchor wheel saddle barrel".split()
)
MATERIALS = tuple("copper marble cotton silk iron glass leather paper bronze wool steel clay".split())  # noqa: SIM905
GREEK = tuple("alpha beta gamma delta epsilon zeta theta kappa lambda sigma omega tau".split())  # noqa: SIM905
NONSENSE = tuple("blicket dax wug toma fep zorp gazzer lorp mib tulver kiki nax".split())  # noqa: SIM905
LABELS = tuple("north south east west".split())  # noqa: SIM905
