"""Everything a route needs, built once per process and handed to every request."""

from collections import Counter
from dataclasses import dataclass, field

from starlette.requests import Request

from gateway.auth import ApiKeys
from gateway.errors import Unavailable
from gateway.event_stream import StreamSettings
from gateway.generation import Generations
from gateway.replies import ReplyHub
from gateway.router import Router, ServedModel
from gateway.settings import GatewaySettings
from gateway.tokenizer import ChatTokenizer
from observability.telemetry import Telemetry


@dataclass(slots=True)
class Gateway:
    """One gateway process."""

    settings: GatewaySettings
    hub: ReplyHub
    router: Router
    generations: Generations
    tokenizer: ChatTokenizer
    api_keys: ApiKeys
    telemetry: Telemetry
    draining_since: float | None = None  # monotonic
    open_streams: Counter[str] = field(default_factory=Counter)  # reply ID to streams that follow it here

    @property
    def draining(self) -> bool:
        return self.draining_since is not None

    @property
    def stream_settings(self) -> StreamSettings:
        settings = self.settings
        return StreamSettings(settings.keepalive_s, settings.keepalive_mode, settings.slow_client_s)

    @property
    def model(self) -> ServedModel:
        """The model that the workers serve. Raises Unavailable until one has said so."""
        model = self.router.model
        if model is None:
            raise Unavailable("no decode worker is up", code="decode_unavailable")
        return model


def gateway_of(request: Request) -> Gateway:
    """The process that the request came to."""
    gateway: Gateway = request.app.state.gateway
    return gateway
