"""How many connections a client may open, derived from how many requests are to be in flight (invariant 7).

A pool smaller than the concurrency does not fail: it queues inside the HTTP client, where no timing sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pvg.errors import ConfigurationError

# Small runs get these anyway: weight updates and health checks share a client that must never be the bottleneck.
FLOOR_TOTAL = 500
FLOOR_PER_HOST = 200


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Most connections open at once: to all `hosts` together, and to each of them."""

    total: int
    per_host: int
    hosts: int = 1

    @classmethod
    def derive(cls, concurrency: int, hosts: int = 1) -> ConnectionLimits:
        """Limits under which `concurrency` requests spread evenly over `hosts` never wait for a connection.

        Raises ConfigurationError when either is below 1.
        """
        _check_positive(concurrency, hosts)
        per_host = max(FLOOR_PER_HOST, -(-concurrency // hosts))
        return cls(total=max(FLOOR_TOTAL, concurrency), per_host=per_host, hosts=hosts)

    @property
    def capacity(self) -> int:
        """Requests that can really be in flight."""
        return min(self.total, self.per_host * self.hosts)

    def assert_covers(self, concurrency: int) -> None:
        """Raises ConfigurationError naming the limit that is too low for `concurrency` requests in flight."""
        _check_positive(concurrency, self.hosts)
        if self.total < concurrency:
            raise ConfigurationError(
                f"The connection limit of {self.total} is below the concurrency of {concurrency}.",
                f"Raise it to {concurrency}, or lower rollout.concurrency.",
            )
        if self.per_host * self.hosts < concurrency:
            raise ConfigurationError(
                f"The limit of {self.per_host} connections per host allows {self.per_host * self.hosts} to "
                f"{self.hosts} host(s), below the concurrency of {concurrency}.",
                f"Raise it to {-(-concurrency // self.hosts)}, add hosts, or lower rollout.concurrency.",
            )


def _check_positive(concurrency: int, hosts: int) -> None:
    if concurrency < 1 or hosts < 1:
        raise ConfigurationError(f"The concurrency ({concurrency}) and the hosts ({hosts}) must be at least 1.")
