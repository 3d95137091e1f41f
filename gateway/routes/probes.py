"""`/livez`, `/readyz`, `/metrics` and the chat page."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from gateway.context import gateway_of

_PAGE = Path(__file__).parent.parent / "web" / "index.html"


async def livez(request: Request) -> Response:
    """The process answers; nothing else is asked."""
    return PlainTextResponse("ok\n")


async def readyz(request: Request) -> Response:
    """200 while new replies can be generated; a log that is down only degrades (unless required)."""
    gateway = gateway_of(request)
    degraded = gateway.hub.degraded
    if gateway.draining:
        status, code = "draining", 503
    elif not gateway.router.is_ready:
        status, code = "no_workers", 503
    elif degraded and gateway.settings.require_log:
        status, code = "log_down", 503
    else:
        status, code = ("degraded" if degraded else "ok"), 200
    counts = gateway.router.counts
    return JSONResponse({"status": status, "draining": gateway.draining, "workers": counts}, code)


async def metrics(request: Request) -> Response:
    """Prometheus or OpenMetrics, as asked for."""
    body, content_type = gateway_of(request).telemetry.metrics.render(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


async def chat_page(request: Request) -> Response:
    """The page to try it with."""
    return FileResponse(_PAGE, headers={"cache-control": "no-cache"})
