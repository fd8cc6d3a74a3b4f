"""The task with tools that misbehave where a scenario says so."""

import threading
from typing import Annotated

from pydantic import Field

from art_gym import tool
from art_gym.scenarios import Scenario
from rollout.ledger_env import Ledger, LedgerEnv

AT = 2
"""The entry whose reading goes wrong."""

FAULTS = ("raise", "block", "eat")


class FaultyLedgerEnv(LedgerEnv):
    """`options["fault"]` may name one of `FAULTS`: an exception, a call that never returns, or one that takes memory until there is none."""

    instant = False

    @tool
    def look(self, ledger: Ledger, index: Annotated[int, Field(ge=0, le=7)]) -> str:
        """Read one entry of a ledger.

        Args:
            ledger: The ledger's number.
            index: Which entry, from 0.
        """
        if index == AT:
            match self.options.get("fault"):
                case "raise":
                    raise KeyError(f"ledger {ledger} has a torn page")
                case "block":
                    threading.Event().wait()
                case "eat":
                    eaten = []
                    while True:
                        eaten.append(bytearray(2**26))
        return super().look(ledger, index)


def faulty_scenarios(count: int, faults: dict[int, str]) -> list[Scenario]:
    """Make so many scenarios; `faults` says in which ones a tool misbehaves, and how."""
    return [
        Scenario(f"ledger-{number}", seed=number, options={"ledger": number} | ({"fault": faults[number]} if number in faults else {}))
        for number in range(count)
    ]
