"""Run a part of a benchmark in a process of its own, which prints its results among other output."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

MARK = "LINE "


def say(line: Mapping[str, Any]):
    """Print a result for the process that waits for this one."""
    print(MARK + json.dumps(line), flush=True)


def lines_in(output: str) -> Iterator[dict[str, Any]]:
    """Yield the results in the output of a process."""
    for line in output.splitlines():
        if line.startswith(MARK):
            yield json.loads(line[len(MARK) :])


def ended(command: list[str], environment: Mapping[str, str], limit: float) -> tuple[str, str, str | None]:
    """Return the output, the errors and how a process failed, or None. It and its children end with the limit."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors, start_new_session=True)
        try:
            code = process.wait(limit)
            failure = f"exit status {code}" if code else None
        except subprocess.TimeoutExpired:
            failure = f"ran past {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        errors.seek(0)
        return output.read(), errors.read(), failure
