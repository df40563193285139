"""Turns that wait, by tenant, and whose turn is next.

Each tenant has a counter of the tokens computed for it; the tenant with the least goes first, and one that was away
does not come back with credit. This is the virtual token counter of Sheng et al., "Fairness in Serving Large Language
Models" (OSDI 2024): like deficit round robin it bounds how far two tenants that both always wait can drift apart, and
it needs no guess of a turn's length. Between turns of one tenant priority decides, then arrival.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.conversation import Conversation

# A generated token takes a step of its own.
GENERATED_WEIGHT = 2


class TokenCounters:
    """Tokens computed per tenant that has turns, or had them and would else come back with credit."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._turns: dict[str, int] = {}  # waiting and running

    def __getitem__(self, tenant: str) -> int:
        return self._tokens.get(tenant, 0)

    def turns_of(self, tenant: str) -> int:
        """Turns of a tenant that wait or run."""
        return self._turns.get(tenant, 0)

    def arrive(self, tenant: str) -> None:
        """A turn of `tenant` came; a tenant that had none starts no lower than those that have some."""
        if tenant not in self._turns and self._turns:
            least = min(self._tokens[other] for other in self._turns)
            self._tokens[tenant] = max(self[tenant], least)
        self._tokens.setdefault(tenant, 0)
        self._turns[tenant] = self.turns_of(tenant) + 1

    def charge(self, tenant: str, num_computed: int, num_generated: int) -> None:
        """Prompt tokens that were computed, and tokens generated."""
        self._tokens[tenant] += num_computed + GENERATED_WEIGHT * num_generated

    def leave(self, tenant: str) -> None:
        """A turn is over. Counters that say nothing any more are forgotten."""
        self._turns[tenant] -= 1
        if not self._turns[tenant]:
            del self._turns[tenant]
        least = min((self._tokens[other] for other in self._turns), default=None)
        for other in [name for name in self._tokens if name not in self._turns]:
            if least is None or self._tokens[other] <= least:
                del self._tokens[other]


class WaitingTurns:
    """Conversations whose turn waits. Those put back go before all others of their tenant."""

    def __init__(self, counters: TokenCounters) -> None:
        self._counters = counters
        self._by_tenant: dict[str, list[Conversation]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def __contains__(self, conversation: Conversation) -> bool:
        return conversation in self._by_tenant.get(conversation.tenant, ())

    def __iter__(self) -> Iterator[Conversation]:
        return (conversation for turns in self._by_tenant.values() for conversation in turns)

    def of_tenant(self, tenant: str) -> int:
        """How many turns of one tenant wait."""
        return len(self._by_tenant.get(tenant, ()))

    def add(self, conversation: Conversation) -> None:
        """Behind those of the same or a higher priority."""
        turns = self._by_tenant.setdefault(conversation.tenant, [])
        place = next((i for i, other in enumerate(turns) if other.priority < conversation.priority), len(turns))
        turns.insert(place, conversation)

    def put_back(self, conversation: Conversation) -> None:
        """A turn that ran and has to start over."""
        self._by_tenant.setdefault(conversation.tenant, []).insert(0, conversation)

    def remove(self, conversation: Conversation) -> None:
        turns = self._by_tenant[conversation.tenant]
        turns.remove(conversation)
        if not turns:
            del self._by_tenant[conversation.tenant]

    def heads(self) -> list[Conversation]:
        """The next turn of every tenant, those first whose tenant was given least."""
        tenants = sorted(self._by_tenant, key=self._counters.__getitem__)
        return [self._by_tenant[tenant][0] for tenant in tenants]
