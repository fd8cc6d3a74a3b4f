"""The task as an environment."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from art_gym import ToolEnv, tool
from art_gym.scenarios import Scenario
from rollout import ledger as task

Ledger = Annotated[int, Field(ge=0)]


class LedgerEnv(ToolEnv):
    """Read the entries of a ledger one by one, then report their total.

    Args:
        entries: How many a ledger has; an episode takes one turn more.
    """

    instructions = task.INSTRUCTIONS
    instant = True
    max_turns = 10

    def __init__(self, entries: int = 4, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.entries = entries

    def start(self) -> str:
        self.ledger = self.options["ledger"]
        return task.question(self.ledger, self.entries)

    @tool
    def look(self, ledger: Ledger, index: Annotated[int, Field(ge=0, le=7)]) -> str:
        """Read one entry of a ledger.

        Args:
            ledger: The ledger's number.
            index: Which entry, from 0.
        """
        self.reward("read", 0.1)
        return task.look(ledger, index)

    @tool
    def report(self, ledger: Ledger, total: int) -> str:
        """Report the total of a ledger's entries.

        Args:
            ledger: The ledger's number.
            total: The sum of the entries.
        """
        right = (ledger, total) == (self.ledger, task.total(self.ledger, self.entries))
        self.finish(reward=float(right), success=right)
        return task.report(ledger, total)


def scenarios(count: int, start: int = 0) -> Iterator[Scenario]:
    """Yield the scenarios of so many ledgers, each of another number."""
    return (Scenario(f"ledger-{number}", seed=number, options={"ledger": number}) for number in range(start, start + count))
