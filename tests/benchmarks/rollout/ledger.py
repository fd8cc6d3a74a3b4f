"""The task that every client plays: read the entries of a ledger one by one, then report their total.

Standard library only, so that the endpoint starts at once and other interpreters can import it.
"""

INSTRUCTIONS = "You are an accountant. Read the ledger's entries one by one with look, then report their total. Call one tool at a time."

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Read one entry of a ledger.",
            "parameters": {
                "type": "object",
                "properties": {
                    "ledger": {"type": "integer", "minimum": 0, "description": "The ledger's number."},
                    "index": {"type": "integer", "minimum": 0, "maximum": 7, "description": "Which entry, from 0."},
                },
                "required": ["ledger", "index"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "report",
            "description": "Report the total of a ledger's entries.",
            "parameters": {
                "type": "object",
                "properties": {
                    "ledger": {"type": "integer", "minimum": 0, "description": "The ledger's number."},
                    "total": {"type": "integer", "description": "The sum of the entries."},
                },
                "required": ["ledger", "total"],
                "additionalProperties": False,
            },
        },
    },
]


def question(ledger: int, entries: int) -> str:
    return f"What do the {entries} entries of ledger {ledger} add up to?"


def entry(ledger: int, index: int) -> int:
    return (ledger * 7919 + index * 104_729) % 997


def total(ledger: int, entries: int) -> int:
    return sum(entry(ledger, index) for index in range(entries))


def look(ledger: int, index: int) -> str:
    """Read one entry of a ledger.

    Args:
        ledger: The ledger's number.
        index: Which entry, from 0.
    """
    return f"Entry {index} of ledger {ledger} is {entry(ledger, index)}."


def report(ledger: int, total: int) -> str:
    """Report the total of a ledger's entries.

    Args:
        ledger: The ledger's number.
        total: The sum of the entries.
    """
    return f"Ledger {ledger} is closed with a total of {total}."
