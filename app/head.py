"""HEAD, answered as GET without the body."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class AnswerHead:
    """Asks the application as for GET, and sends on what comes before the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        started = False

        async def without_body(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                started = True

        async def gone_once_answered() -> Message:
            # A stream would never end by itself.
            return {"type": "http.disconnect"} if started else await receive()

        await self._app({**scope, "method": "GET"}, gone_once_answered, without_body)
