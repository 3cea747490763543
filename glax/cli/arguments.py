"""Define the types of the subcommands' arguments. A refusal is one line."""

import argparse
from pathlib import Path

INT32 = 2**31 - 1  # the most that a dimension of an array or a counter of steps can be
DIGITS = 1000  # digits; Python reads no integers of several thousand


def within(least: int, most: int = INT32):
    """Return an argparse type for integers from least to most."""

    def integer(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
        if number > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {number}")
        return number

    return integer


def a_path(text: str) -> Path:
    """Return the path that the argument names; an argparse type."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"must be the name of a file or folder, got {text!r}")
    return Path(text)


def four_numbers(text: str) -> tuple[int, ...]:
    """Return the four integers B,T,H,D of the argument; an argparse type."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isdecimal() and len(part) <= DIGITS]
    if len(parts) != 4 or len(numbers) != 4 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"must be B,T,H,D, four integers of at least 1, got {text!r:.80}")
    if max(numbers) > INT32:
        raise argparse.ArgumentTypeError(f"must be B,T,H,D, each at most {INT32}, got {text!r:.80}")
    return tuple(numbers)
