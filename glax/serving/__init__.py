"""Hold the states of a server's requests.

`StatePool` writes a state once in several tokens. `PrefixCache` finds the states behind prefixes that requests share, and
`PrefixStore` holds those of whole models.
"""

from glax._src.serving.prefix_cache import Prefix, PrefixCache, PrefixStore
from glax._src.serving.replayed_pool import StatePool

__all__ = ["Prefix", "PrefixCache", "PrefixStore", "StatePool"]
