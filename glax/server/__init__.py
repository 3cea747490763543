"""Serve a model to many clients. `Scheduler` runs the requests of any interface in shared rounds; `glax serve` is the one over
HTTP.

>>> scheduler = glax.server.Scheduler(model)
>>> scheduler.start()
>>> ticket = scheduler.submit(glax.server.Request(tokens, max_tokens=100), print)
"""

from glax.server.request import Finished, QueueFull, Request, Stopped, Token
from glax.server.scheduler import Counts, Scheduler, Ticket

__all__ = ["Counts", "Finished", "QueueFull", "Request", "Scheduler", "Stopped", "Ticket", "Token"]
