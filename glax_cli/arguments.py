"""Define the types and numbers of the command line. A refusal is one line."""

import argparse
from pathlib import Path

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
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


def number(least: float, most: float):
    """Return an argparse type for numbers from least to most."""

    def real(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be from {least} to {most}, got {text}")
        return value

    return real


def a_path(text: str) -> Path:
    """Return the path that the argument names; an argparse type."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"must be the name of a file or folder, got {text!r}")
    return Path(text)


def integers(*forms: str):
    """Return an argparse type for as many integers of at least 1 as one of the forms has, such as "B,T,H,D"."""
    wanted = " or ".join(forms)
    counts = {form.count(",") + 1 for form in forms}

    def several(text: str) -> tuple[int, ...]:
        parts = [part.strip() for part in text.split(",")]
        numbers = [int(part) for part in parts if part.isdecimal() and len(part) <= DIGITS]
        if len(parts) not in counts or len(numbers) != len(parts) or min(numbers) < 1:
            raise argparse.ArgumentTypeError(f"must be {wanted}, integers of at least 1, got {text!r:.80}")
        if max(numbers) > INT32:
            raise argparse.ArgumentTypeError(f"must be {wanted}, each at most {INT32}, got {text!r:.80}")
        return tuple(numbers)

    return several
