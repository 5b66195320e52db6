"""Redis as Celery speaks to it, without what ends a worker there."""

from typing import Any

import structlog
from kombu.transport import TRANSPORT_ALIASES
from kombu.transport import redis as kombu_redis
from redis.exceptions import ConnectionError as BrokerAway
from redis.exceptions import ResponseError

log = structlog.get_logger()


class Channel(kombu_redis.Channel):
    """Drops and counts messages that are none; a server that refuses counts as one that is away."""

    dropped = 0

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[no-untyped-call]
        except ResponseError as error:  # read-only, or its memory is full
            raise BrokerAway(str(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            type(self).dropped += 1
            log.warning("broker.junk", dropped=self.dropped, error=str(error)[:200])
            return None


class Transport(kombu_redis.Transport):
    """Redis with our channel."""

    Channel = Channel


def use() -> None:
    """Have Celery take it for all `redis://` addresses, sockets included."""
    TRANSPORT_ALIASES["redis"] = f"{__name__}:Transport"
